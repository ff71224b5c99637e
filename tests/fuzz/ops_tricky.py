"""Op kinds with state, randomness or a backward of their own; losses; and what a module returns."""

from __future__ import annotations

from .table import LOSS, RETURN, op


# -- custom backward passes ------------------------------------------------------------------------
def function(name: str, forward: str, backward: str) -> str:
    return (
        f"class {name}(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        ctx.save_for_backward(x)\n"
        f"        return {forward}\n"
        "    @staticmethod\n    def backward(ctx, g):\n        (x,) = ctx.saved_tensors\n"
        f"        return {backward}\n"
    )


for name, forward, backward in (
    ("StraightThrough", "x.round()", "g"),
    ("Reversed", "x.clone()", "-0.5 * g"),
    ("Clipped", "x * 2", "g.clamp(-0.01, 0.01) * 2"),
    ("MixesRows", "x * 1", "g - g.mean(0, keepdim=True)"),
    ("MixesColumns", "x + 0", "g.cumsum(-1)"),
    ("OwnSilu", "x * x.sigmoid()", "g * (x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()))"),
):
    op(name, name + ".apply({x})", define=function(name, forward, backward), weight=1.5)
op("beside_straight_through", "{x} + StraightThrough.apply({x})",
   define=function("StraightThrough", "x.round()", "g"))  # fmt: skip
op("straight_through_by_detach", "{x} + ({x}.round() - {x}).detach()")
op("detached", "{x} + {y}.detach()")
op("no_grad", "with torch.no_grad():\n    t = {x}.sigmoid()\n{x} * t")
op("frozen_branch", "with torch.no_grad():\n    t = self.{m}({x})\n{x} * t.sigmoid()",
   init="self.{m} = nn.Linear({h}, {h})")  # fmt: skip
op("tensor_hook", "z = {x} * 1\nz.register_hook(lambda g: g * 0.5) if z.requires_grad else None\nz",
   weight=0.5)  # fmt: skip
op("forward_hook", "self.{m}({x})", weight=0.5, init="self.{m} = nn.Linear({h}, {o})\n"
   "self.{m}.register_forward_hook(lambda module, args, out: out * 2)")  # fmt: skip
op("backward_hook", "self.{m}({x})", weight=0.5, init="self.{m} = nn.Linear({h}, {o})\n"
   "self.{m}.register_full_backward_hook(lambda module, gi, go: tuple(g * 0.5 if g is not None "
   "else None for g in gi))")  # fmt: skip
op("parameter_hook", "self.{m}({x})", weight=0.5, init="self.{m} = nn.Linear({h}, {o})\n"
   "self.{m}.weight.register_hook(lambda g: g * 0.5)")  # fmt: skip
for kind in ("True", "False"):
    op("checkpoint_reentrant" if kind == "True" else "checkpoint",
       "torch.utils.checkpoint.checkpoint(self.{m}, {x}, use_reentrant=" + kind + ")",
       init="self.{m} = nn.Sequential(nn.Linear({h}, {o}), nn.GELU(), nn.Linear({o}, {h}))",
       define="import torch.utils.checkpoint\n")  # fmt: skip
op("inner_gradient", "z = {x}.detach().requires_grad_()\n"
   "{x} - 0.1 * torch.autograd.grad((z ** 3).sum(), z)[0]", weight=0.3)  # fmt: skip
DERIVED = 2.0  # the weight of derivatives in forward: each is traced in a way of its own
op("force", "z = {x}.detach().requires_grad_()\n"
   "{x} + torch.autograd.grad(self.{m}(z).tanh().sum(), z, create_graph=True)[0]", weight=DERIVED,
   init="self.{m} = nn.Linear({h}, {o})")  # fmt: skip
op("gradient_penalty", "z = {x}.detach().requires_grad_()\n"
   "slope, = torch.autograd.grad(self.{m}(z).tanh().sum(), z, create_graph=True)\n"
   "{x} * (1 + slope.square().sum(-1, keepdim=True))", weight=DERIVED,
   init="self.{m} = nn.Linear({h}, {o})")  # fmt: skip
op("inner_step", "error = (self.{m}({x}) - {x}).square().mean()\n"
   "slope, = torch.autograd.grad(error, self.{m}.weight, create_graph=True)\n"
   "F.linear({x}, self.{m}.weight - 0.1 * slope)", weight=DERIVED,
   init="self.{m} = nn.Linear({h}, {h})")  # fmt: skip
op("slopes", "{x} + torch.func.vmap(torch.func.grad(lambda row: self.{m}(row).tanh().sum()))({x})",
   weight=DERIVED, init="self.{m} = nn.Linear({h}, {o})")  # fmt: skip
op("along_a_line", "torch.func.jvp(lambda z: self.{m}(z).tanh(), ({x},), ({y},))[1]",
   weight=DERIVED, init="self.{m} = nn.Linear({h}, {o})")  # fmt: skip
op("vmap", "torch.func.vmap(lambda row: row * row.sum(-1, keepdim=True) / {h})({x})", weight=0.5)
op("custom_op", "torch.ops.fuzz.mixing({x})", weight=0.7, define=(
    "if not hasattr(torch.ops.fuzz, 'mixing'):\n"
    "    mixing = torch.library.custom_op('fuzz::mixing', lambda x: x * 2, mutates_args=(), "
    "schema='(Tensor x) -> Tensor')\n"
    "    mixing.register_fake(lambda x: torch.empty_like(x))\n"
    "    mixing.register_autograd(lambda ctx, g: 2 * g + 0.1 * g.sum(0, keepdim=True))\n"
))  # fmt: skip

# -- state -----------------------------------------------------------------------------------------
op("moving_average", "with torch.no_grad():\n    self.{m}.mul_(0.9).add_({x}.flatten(0, -2).mean(0)"
   ", alpha=0.1)\n{x} - self.{m}",
   init="self.register_buffer('{m}', torch.zeros({h}))")  # fmt: skip
op("counter", "self.{m} += 1\n{x} / self.{m}",
   init="self.register_buffer('{m}', torch.zeros((), dtype=torch.int64))")  # fmt: skip
op("attribute_counter", "self.{m} += 1\n{x} / self.{m}", init="self.{m} = 0", weight=0.3)
op("attribute_kept", "old, self.{m} = self.{m}, {x}.detach()\n{x} if old is None else {x} + old",
   init="self.{m} = None", weight=0.3)  # fmt: skip
op("maximum_seen", "self.{m}.copy_(torch.maximum(self.{m}, {x}.detach().abs().amax()))\n"
   "{x} / self.{m}", init="self.register_buffer('{m}', torch.ones(()))")  # fmt: skip
op("fixed_buffer", "{x} * self.{m}", init="self.register_buffer('{m}', torch.rand({h}) + 0.5, "
   "persistent={flag})")  # fmt: skip
op("tied", "self.{m}b(self.{m}a({x}).tanh())", init="self.{m}a, self.{m}b = nn.Linear({h}, {h}), "
   "nn.Linear({h}, {h})\nself.{m}b.weight = self.{m}a.weight")  # fmt: skip

# -- random numbers --------------------------------------------------------------------------------
op("dropout", "F.dropout({x}, {pick(0.2, 0.5)})", weight=4)
op("dropout_mlp", "{x} + self.{m}b(F.dropout(F.gelu(self.{m}a({x})), 0.2))",
   init="self.{m}a = nn.Linear({h}, {o})\nself.{m}b = nn.Linear({o}, {h})")  # fmt: skip
op("dropout_attention", "y = F.dropout({x}, 0.3)\n"
   "(self.{m}a(y) @ self.{m}b(y).mT).softmax(-1) @ y", when="n >= 2",
   init="self.{m}a, self.{m}b = nn.Linear({h}, {o}), nn.Linear({h}, {o})")  # fmt: skip
op("attention_dropout", "q, k, v = (t.unflatten(-1, ({k}, -1)).transpose(1, 2) for t in "
   "self.{m}({x}).chunk(3, -1))\nF.scaled_dot_product_attention(q, k, v, dropout_p=0.3)"
   ".transpose(1, 2).flatten(2)", when="n == 3", init="self.{m} = nn.Linear({h}, 3 * {h})",
)  # fmt: skip
op("dropout_of_weight", "F.linear({x}, F.dropout(self.{m}, 0.3))",
   init="self.{m} = nn.Parameter(torch.randn({o}, {h}) / 4)")  # fmt: skip
op("noise", "{x} + 0.3 * torch.randn_like({x})", weight=2)
op("reparametrised", "mean, spread = self.{m}({x}).chunk(2, -1)\n"
   "mean + (0.1 * spread).exp() * torch.randn_like(mean)",
   init="self.{m} = nn.Linear({h}, 2 * {o})", weight=2)  # fmt: skip
op("timestep", "t = torch.randint(0, 5, ({b},))\n"
   "{x} + self.{m}(t).reshape({b}, *[1] * ({n} - 2), -1)",
   when="n >= 2", init="self.{m} = nn.Embedding(5, {h})", weight=2)  # fmt: skip
op("noise_by_timestep", "t = torch.randint(1, 9, {x}.shape[:1])\n"
   "t = t.reshape(-1, *[1] * ({n} - 1)) / 10\n"
   "t.sqrt() * {x} + (1 - t).sqrt() * torch.randn_like({x})", when="n >= 1", weight=2)  # fmt: skip
op("uniform_noise", "{x} * (0.5 + torch.rand_like({x}))", weight=2)
op("coin", "{x} * torch.bernoulli(torch.full_like({x}, {pick(0.3, 0.8)}))", weight=2)
op("gumbel", "({x} - torch.empty_like({x}).exponential_().log()).softmax(-1)", weight=2)
op("permuted_rows", "{x}[torch.randperm({b})]", weight=2)

# What a summary counts: modules whose forward has one of these.
IN_FORWARD = {
    "derivatives": {
        "along_a_line", "force", "gradient_penalty", "inner_gradient", "inner_step", "slopes",
    },
    "draws": {
        "attention_dropout", "coin", "dropout", "dropout_attention", "dropout_mlp",
        "dropout_module", "dropout_of_weight", "gumbel", "noise", "noise_by_timestep",
        "permuted_rows", "reparametrised", "timestep", "uniform_noise",
    },
}  # fmt: skip

# -- what habits change (habits.py) ----------------------------------------------------------------
op("switched", "{x} + self.{m}({x}) if self.{m}_on else {x} * 2",
   init="self.{m}, self.{m}_on = nn.Linear({h}, {h}), {flag}", weight=0.5)  # fmt: skip
op("gain", "{x} * self.{m} + (1 - self.{m})", init="self.{m} = {pick(0.5, 1.0, 1.5)}", weight=0.5)
op("gain_exp", "{x} * math.exp(-self.{m})", init="self.{m} = 0.5", weight=0.5,
   define="import math\n")  # fmt: skip
op("gain_by_int", "{x} / self.{m}", init="self.{m} = {pick(2, 3)}", weight=0.5)
op("dropout_module", "self.{m}({x})", init="self.{m} = nn.Dropout({pick(0.2, 0.5)})", weight=0.5)
op("argument", "(1 - {given('0.25')}) * {x} + {x}.tanh()", weight=0.5)
op("argument_branch", "b = {given('0.25')}\n{x} * b if b > 0.2 else {x}", weight=0.5)
op("argument_int", "{x} * {given('2')}", weight=0.5)

# -- dtypes ----------------------------------------------------------------------------------------
op("half_precision", "self.{m}({x}.float().double())", init="self.{m} = nn.Linear({h}, {o})",
   loose=True)  # fmt: skip
op("float_softmax", "{x}.softmax(-1, dtype=torch.float32).to({x}.dtype)", loose=True)
op("to_integers", "({x} * 4).round().long() / 4 + {x}")
op("float_norm", "z = {x}.float()\n(z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-3))"
   ".type_as({x})", loose=True)  # fmt: skip
op("fft", "torch.fft.fft({x}).real / {h}", weight=0.5)
op("autocast_off", "with torch.autocast('cpu', enabled=False):\n    z = {x} * 2\nz", weight=0.5)

# -- losses ----------------------------------------------------------------------------------------
MEAN = "reduction={pick(repr('mean'), repr('sum'))}"


def loss(name: str, text: str, when: str = "True", init: str = "", weight: float = 1.0) -> None:
    op(name, text, kind=LOSS, when=when, init=init, weight=weight)


TARGET = "{given(f'torch.randn({shape})')}"
loss("mean_square", "{x}.square().mean()", weight=2)
loss("sum_square", "{x}.square().sum() / 10")
loss("weighted_sum", "({x} * {given(f'torch.randn({shape})')}).sum()", weight=2)
loss("mean_abs", "{x}.abs().mean()")
loss("mean_cube", "({x} ** 3).mean()")
loss("by_hand", "(({x} - " + TARGET + ") ** 2).sum() / {x}.numel()")
for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
    loss(name, "F." + name + "({x}, " + TARGET + ", " + MEAN + ")")
loss("mse_of_transposed", "F.mse_loss({x}.mT, {given(f'torch.randn({shape}).mT')})")
loss("mse_none", "F.mse_loss({x}, " + TARGET + ", reduction='none').mean(-1).sum()")
CLASSES = "{given(f'torch.randint(0, {h}, ({size // h},))')}"
loss("cross_entropy", "F.cross_entropy({x}.flatten(0, -2), " + CLASSES + ", " + MEAN
     + ", label_smoothing={pick2(0.0, 0.1)})", weight=3)  # fmt: skip
loss("cross_entropy_ignored", "F.cross_entropy({x}.flatten(0, -2), " + CLASSES
     + ", ignore_index=1)")  # fmt: skip
loss("cross_entropy_weighted", "F.cross_entropy({x}.flatten(0, -2), " + CLASSES
     + ", weight=self.{m}, " + MEAN + ")",
     init="self.register_buffer('{m}', torch.rand({h}) + 0.2)")  # fmt: skip
loss("cross_entropy_of_images", "F.cross_entropy({x}, {given(f'torch.randint(0, {c}, {b, *shape[2:]"
     "})')})", when="n >= 3")  # fmt: skip
loss("cross_entropy_of_probabilities", "F.cross_entropy({x}.flatten(0, -2), "
     "{given(f'torch.rand({size // h}, {h}).softmax(-1)')})")  # fmt: skip
loss("causal_loss", "F.cross_entropy({x}[:, :-1].flatten(0, 1), {given(f'torch.randint(0, {h}, "
     "({b}, {c}))')}[:, 1:].flatten())", when="n == 3 and c > 1")  # fmt: skip
loss("nll", "F.nll_loss({x}.log_softmax(-1).flatten(0, -2), " + CLASSES + ", " + MEAN + ")")
loss("nll_by_gather", "-{x}.flatten(0, -2).log_softmax(-1).gather(1, " + CLASSES
     + "[:, None]).mean()")  # fmt: skip
loss("bce", "F.binary_cross_entropy_with_logits({x}, {given(f'torch.rand({shape})')}, " + MEAN
     + ")")  # fmt: skip
loss("bce_of_sigmoid", "F.binary_cross_entropy({x}.sigmoid(), {given(f'torch.rand({shape})')})")
loss("kl", "F.kl_div({x}.log_softmax(-1), {given(f'torch.rand({shape}).softmax(-1)')}, "
     "reduction='batchmean')")  # fmt: skip
loss("cosine_loss", "(1 - F.cosine_similarity({x}, " + TARGET + ", dim=-1)).mean()")
loss("masked_mean", "m = {given(f'torch.rand({shape[:-1]}) > 0.4')}\n"
     "(torch.where(m, {x}.square().mean(-1), 0)).sum() / m.sum().clamp(min=1)")  # fmt: skip
loss("contrastive", "z = F.normalize({x}.flatten(1), dim=-1)\n"
     "F.cross_entropy(z @ z.mT / 0.5, torch.arange({b}))")  # fmt: skip
loss("poisson", "F.poisson_nll_loss({x}.clamp(max=2), {given(f'torch.rand({shape})')})")
loss("gaussian", "F.gaussian_nll_loss({x}, " + TARGET + ", {x}.abs() + 0.5)", weight=0.2)
loss("soft_margin", "F.soft_margin_loss({x}, {given(f'torch.randn({shape}).sign()')})")
loss("multi_margin", "F.multi_margin_loss({x}.flatten(0, -2), " + CLASSES + ")", when="h > 1")
loss("logsumexp_loss", "{x}.logsumexp(-1).mean()")
loss("norm_loss", "{x}.norm()")
loss("variance_loss", "{x}.var() + {x}.mean(0).square().sum()")
loss("with_weight_decay", "{x}.square().mean() + 0.1 * sum(p.square().sum() for p in "
     "self.parameters())")  # fmt: skip
loss("largest", "{x}.max() + {x}.square().mean()")

# -- what it returns -------------------------------------------------------------------------------
for name, text, weight in (
    ("loss", "loss", 5),
    ("loss_and_value", "loss, {x}", 2),
    ("loss_and_other", "loss, {other}", 2),
    ("dictionary", "dict(loss=loss, y={x}, best={x}.argmax(-1), n=3, none=None)", 2),
    ("two_losses", "loss, {other}.square().mean() * 0.3", 2),
    ("loss_and_detached", "loss, loss.detach(), {other}.detach().mean(0)", 1),
    ("loss_times", "loss * 2 + {other}.mean()", 1),
    ("loss_and_input", "loss, x", 1),
    ("no_loss", "{x}", 1),
    ("no_loss_but_two", "{x}, {other}.mean(-1)", 0.7),
):
    op("return_" + name, text, kind=RETURN, weight=weight)
