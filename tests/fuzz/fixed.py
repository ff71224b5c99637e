# ruff: noqa: E501  (a case is one line, as it is printed)
"""Cases that stay: FIXED of all kinds, which never failed, and MENDED, each of which once did.

A failure that is mended becomes a line of MENDED, as `python -m tests.fuzz` prints it, under a name
that says what was wrong. GLOO are for four real ranks: what only the scheduled graphs, DTensors or
process groups do.
"""

from __future__ import annotations

MENDED = {
    # a pushed-back copy of dropout drew another mask
    "dropout drawn twice": "rows 12x24 | dropout_attention:1 | mean_square:0 return_loss:0 | | 4 | 'ddp'",
    # export runs the forward of a custom function only, and no hook
    "straight through": "rows 4x8 | linear:1 StraightThrough:1 linear:1 | mean_square:0 return_loss:0 | | 2 | 'ddp'",
    "beside straight through": "rows 4x8 | linear:1 beside_straight_through:1 linear:1 | mean_square:0 return_loss:0 | | 2 | 'fsdp'",
    "gradient reversal": "rows 4x8 | linear:1 Reversed:1 linear:1 | mean_square:0 return_loss:0 | | 2 | 'auto'",
    "hook behind a function": "sequences 8x2x16 | linear:1 sub:440 Clipped:412 tensor_hook:195 | mean_square:0 return_two_losses:490 | | 2 | 'fsdp'",
    "a function of an input": "sequences 11x2x8 | Reversed:332 mlp:1 | mean_square:0 return_loss:0 | input_gradient | 4 | random_plan('w2.x2', 295)",
    # export drops a dropout that nothing uses, and verify took what it draws next for another model
    "dropout that nothing uses": "sequences 2x2x4 | roll:178 linear:1 dropout:329 dropout_attention:878 | weighted_sum:0 return_loss:0 | | 2 | 'ddp'",
    # a table of 102 GiB was asked for
    "a table that outgrows memory": "images 6x12x3x3 | linear:1 adaptive_max_pool:33 new_empty:917 frozen_branch:398 | norm_loss:452 return_two_losses:626 | | 16 | random_plan('w2.x2.y2.z2', 823)",
    # export drops an op that nothing uses, with what it writes in secret
    "statistics that nothing uses": "sequences 2x2x2 | scalar_weight:698 instance_norm:320 | mean_square:0 return_no_loss_but_two:925 | | 2 | 'ddp'",
    "backward mixes rows": "rows 4x8 | linear:1 MixesRows:1 linear:1 | mean_square:0 return_loss:0 | | 2 | 'ddp'",
    "backward mixes columns": "rows 4x8 | linear:1 MixesColumns:1 linear:1 | mean_square:0 return_loss:0 | | 2 | random_plan('x2', 1)",
    "clipped gradient": "rows 4x8 | linear:1 Clipped:1 linear:1 | mean_square:0 return_loss:0 | | 2 | 'auto'",
    "backward hook": "rows 4x8 | linear:1 backward_hook:1 linear:1 | mean_square:0 return_loss:0 | | 2 | 'ddp'",
    "parameter hook": "rows 4x8 | linear:1 parameter_hook:1 linear:1 | mean_square:0 return_loss:0 | | 2 | 'fsdp'",
    "tensor hook": "rows 4x8 | linear:1 tensor_hook:1 linear:1 | mean_square:0 return_loss:0 | | 2 | 'fsdp'",
    "reentrant checkpoint": "rows 4x8 | linear:1 checkpoint_reentrant:1 linear:1 | mean_square:0 return_loss:0 | | 2 | 'ddp'",
    # a probe that tried the forward only, and gradients that hang on the whole batch
    "custom op mixes rows": "rows 4x8 | linear:1 custom_op:1 linear:1 | mean_square:0 return_loss:0 | | 2 | 'ddp'",
    "embedding by frequency": "ids 12x4 | embedding_by_frequency:0 linear:1 | mean_square:0 return_loss:0 | | 2 | 'ddp'",
    "statistics of an instance norm": "images 4x3x4x4 | conv2d:0 instance_norm_2d:2 | mean_square:0 return_loss:0 | | 2 | 'ddp'",
    # what Python keeps from one call to the next
    "attribute counted up": "rows 4x8 | linear:1 attribute_counter:1 | mean_square:0 return_loss:0 | | 2 | 'ddp'",
    "attribute kept": "rows 4x8 | linear:1 attribute_kept:1 | mean_square:0 return_loss:0 | | 2 | 'ddp'",
    # a probe that called an op on shapes of which it cannot be called
    "probed weight norm": "rows 4x8 | weight_norm:1 weight_norm:1 | mean_square:0 return_loss:0 | | 2 | 'auto'",
    # values that are zero but for rounding
    "one number's cosine": "images 2x2x2x2 | swiglu:430 argmax_hot:743 | cosine_loss:231 return_loss:0 | | 2 | 'megatron'",
    "mean of an instance norm": "sequences 4x4x8 | linear:1 instance_norm:1 | mean_square:0 return_no_loss_but_two:3 | | 4 | 'auto'",
    # and every gradient is zero but for rounding: AdamW scaled the noise up at a saddle
    "two rows at a saddle": "ids 2x2 | embedding_bag:838 batch_norm:502 normalize:285 | variance_loss:878 return_loss:0 | | 2 | 'ddp'",
}

# Every one is right by verify and by the module itself.
FIXED = (
    "images 3x3x6x6 | conv2d:40 linear:1 add:522 gather:731 dropout:715 reshape:681 addcmul:279 | variance_loss:622 return_loss:76 | | 3 | autopar.Grid2D(3, 1, 'column')",
    "sequences 14x4x24 | parameter_list:233 mlp:1 transposed_weight:186 to_channels_last:834 softplus:706 roll:93 | norm_loss:864 return_loss_times:987 | | 7 | 'fsdp'",
    "ids 8x6 | embedding_of_two:310 logcumsumexp:706 linear:1 tile:501 cumsum_back:118 swiglu:891 | causal_loss:202 return_loss_and_other:54 | | 4 | '3d'",
    "ids 4x3 | one_hot:976 mlp:1 baddbmm:189 count:984 scale:182 max_pool:444 | contrastive:423 return_two_losses:888 | no_bias_gradient | 8 | random_plan('w8', 991)",
    "sequences 6x4x8 | linear:1 orthogonal_weight:14 cdist:238 batch_norm_eval:288 weight_from_weight:528 | cross_entropy_ignored:876 return_loss_and_detached:270 | | 2 | random_plan('w2', 559)",
    "images 2x3x6x4 | lp_pool:166 linear:1 mlp:521 top_expert:380 atan2:984 max_pool:988 | mean_cube:313 return_loss_and_value:511 | eval | 2 | '4d'",
    "ids 4x4 | embedding:326 attention_rotary:566 linear:1 sub:435 rotate_half:695 cat_with_given:896 linear:519 | kl:225 return_loss:13 | freeze_first | 2 | autopar.Grid2D(2, 1, 'column')",
    "sequences 24x4x6 | linear:1 by_shape:354 conv2d:531 var_mean:935 index_columns:951 | norm_loss:55 return_dictionary:632 | freeze_first | 8 | {'m1*': 'megatron-sp', '*': 'megatron-sp'}",
    "sequences 16x8x8 | conv2d:694 mlp:1 select:727 index_add:292 fmod:743 index_fill:935 | nll_by_gather:713 return_two_losses:679 | | 8 | random_plan('w8', 633)",
    "images 6x3x5x5 | conv2d:777 filled_in_place:364 linear:1 pad:179 row_linear:272 maximum:117 grouped_linear:583 | poisson:707 return_loss_times:606 | | 6 | '4d'",
    "sequences 6x8x6 | chunk:700 linear:1 conv1d_causal:806 | cross_entropy:782 return_no_loss_but_two:929 | | 2 | 'megatron'",
    "ids 6x6 | embedding:359 unbind:54 mlp:1 upsample:5 flip:607 | mean_abs:390 return_no_loss:389 | | 6 | random_plan('w3.x2', 359)",
    "ids 2x4 | embedding_padded:56 mlp:1 pool_tokens:842 batch_norm_2d:569 tensor_split:356 | largest:579 return_loss_and_value:724 | | 2 | 'fsdp'",
    "sequences 5x8x12 | mlp:1 clamp:810 unflatten_batch:665 cdist:192 | mse_of_transposed:362 return_loss_and_input:977 | | 4 | random_plan('w2.x2', 476)",
    "sequences 9x4x24 | mlp:807 linear:1 full_like:646 gelu_tanh:382 normalize:840 | with_weight_decay:167 return_dictionary:825 | | 4 | {'m1*': 'megatron-sp', '*': 'megatron'}",
    "rows 6x12 | linear:1 conv2d:97 compared:547 mask_of_columns:888 | cross_entropy_of_probabilities:621 return_loss_times:101 | | 6 | autopar.Grid2D(6, 1, 'row')",
    "sequences 2x2x4 | mlp:1 encoder_layer:17 flatten_batch:762 | soft_margin:961 return_two_losses:438 | | 2 | {'m1*': 'fsdp', '*': 'fsdp'}",
    "rows 12x12 | mlp:1 mlp:57 log1p:115 flatten:931 | smooth_l1_loss:925 return_loss:572 | | 6 | random_plan('w3.x2', 868)",
    "ids 12x2 | embedding_bag:474 spectral_norm:863 linear:1 | weighted_sum:318 return_loss_and_value:739 | eval | 4 | random_plan('w2.x2', 932)",
    "rows 2x4 | unsqueeze:902 linear:1 view:388 | masked_mean:318 return_loss:778 | | 4 | '3d'",
    "images 8x12x6x4 | mlp:1 linspace:941 scalar_weight:786 pad_rows:334 | mean_cube:774 return_loss:277 | | 8 | '4d'",
    "rows 6x6 | index_constant:381 mlp:1 linear:710 conv_transpose1d:210 best:140 | by_hand:231 return_loss_and_other:129 | freeze_first | 2 | '4d'",
    "images 6x1x4x4 | mlp:1 argsort:845 query_norm:365 hardshrink:612 cumprod:592 | bce:195 return_loss:36 | | 2 | '3d'",
    "ids 8x3 | tied_embedding:654 mlp:1 total:914 reciprocal:562 tensor_split:602 | mean_square:805 return_loss:645 | | 4 | random_plan('w2.x2', 358)",
    "sequences 4x2x8 | response_norm:597 linear:1 | sum_square:657 return_no_loss_but_two:48 | | 4 | 'fsdp'",
    "sequences 4x6x12 | linear:1 vmap:962 | mse_loss:356 return_no_loss_but_two:285 | | 4 | random_plan('w2.x2', 971)",
    "rows 4x8 | tied:310 linear:1 batch_norm_2d:955 | cosine_loss:662 return_loss_and_other:766 | | 4 | 'ddp'",
    "sequences 16x2x12 | linear:1 slice_half:471 | bce:890 return_loss_and_value:238 | | 8 | 'fsdp'",
    "images 11x1x5x4 | conv2d:358 index_fill:967 linear:1 expand:65 cummax:172 logaddexp:634 | mean_square:601 return_loss_and_other:476 | | 3 | {'m1*': 'megatron-sp', '*': 'megatron'}",
    "ids 4x3 | table_lookup:991 gqa_expanded:304 linear:1 | norm_loss:338 return_loss:775 | input_gradient | 4 | '4d'",
    "sequences 6x3x12 | linear:1 stack:337 lerp:285 | weighted_sum:512 return_loss:205 | | 6 | {'m1*': 'megatron-sp', '*': 'megatron-sp'}",
    "ids 24x6 | one_hot:471 amax:884 linear:1 weight_used_twice:160 | smooth_l1_loss:915 return_two_losses:981 | eval | 8 | {'m4*': 'auto', '*': 'megatron-sp'}",
    "ids 8x4 | one_hot:539 linear:1 batch_norm_of_sequences:413 sqrt:610 conv2d:357 | soft_margin:784 return_loss:187 | | 2 | random_plan('w2', 619)",
    "sequences 9x3x9 | squeeze_all:965 mlp:1 hardswish:323 add:265 | sum_square:363 return_no_loss_but_two:911 | input_gradient | 3 | 'atp'",
    "rows 8x8 | linear:1 unfold_image:208 | mse_none:138 return_loss:431 | | 4 | random_plan('w4', 157)",
    "sequences 8x8x8 | linear:1 | multi_margin:694 return_loss:199 | input_gradient | 4 | 'ddp'",
    "sequences 6x4x12 | range_of_rows:375 linear:1 | mse_of_transposed:290 return_loss:373 | | 6 | '4d'",
    "sequences 24x8x24 | straight_through_by_detach:804 linear:1 | contrastive:164 return_loss_and_detached:949 | input_gradient | 8 | 'fsdp'",
    "sequences 24x6x24 | swiglu:597 mlp:1 | logsumexp_loss:197 return_loss_and_other:181 | eval no_bias_gradient | 8 | 'fsdp'",
    "rows 6x3 | attention_window:80 linear:1 sort:379 | mean_square:660 return_loss_times:789 | input_gradient | 3 | '4d'",
    "ids 12x4 | embedding:306 linear:1 mlp:995 cumsum_back:861 new_zeros:534 meshgrid:633 | huber_loss:746 return_loss_times:828 | freeze_first | 6 | random_plan('w2.x3', 700)",
    "images 8x1x6x6 | conv2d:429 mlp:1 mlp:303 pool_max:185 | mean_cube:881 return_loss_and_other:176 | | 8 | 'megatron'",
    "sequences 6x8x3 | layer_norm:111 linear:1 scale:410 linear:196 | with_weight_decay:288 return_loss_and_other:263 | | 3 | {'m1*': 'megatron', '*': 'megatron-sp'}",
    "images 16x1x6x6 | conv2d:140 einsum:29 linear:1 diagonal:627 | cross_entropy:169 return_loss:101 | | 8 | random_plan('w2.x2.y2', 999)",
    "rows 16x16 | erf:761 linear:1 unflatten_batch:883 | cross_entropy:13 return_two_losses:31 | freeze_first | 8 | {'m2*': 'megatron-sp', '*': 'megatron-sp'}",
    "sequences 8x2x4 | mlp:1 pool_sum:615 compared:459 | cross_entropy:922 return_loss:503 | | 8 | 'fsdp'",
    "ids 9x3 | embedding:345 decoder_layer:649 linear:1 | smooth_l1_loss:460 return_two_losses:774 | | 3 | 'ddp'",
    "images 2x1x5x4 | conv2d:646 fixed_buffer:312 mlp:1 | cross_entropy:610 return_loss_and_input:415 | | 2 | random_plan('w2', 291)",
    "images 4x1x4x4 | mlp:1 counter:94 index_constant:704 | mean_square:950 return_loss_and_detached:981 | freeze_first | 4 | random_plan('w2.x2', 710)",
    "sequences 8x2x16 | linear:1 gqa:761 conv2d:300 row_linear:605 | mse_loss:319 return_loss_and_value:527 | freeze_first | 8 | random_plan('w2.x4', 237)",
)

# Random draws and derivatives in forward, each kind once.
IN_FORWARD = {
    "force": "rows 8x8 | linear:1 force:1 | mean_square:0 return_loss:0 | | 4 | 'fsdp'",
    "gradient_penalty": "rows 8x8 | linear:1 gradient_penalty:1 | mean_square:0 return_loss:0 | | 4 | random_plan('w2.x2', 1)",
    "inner_step": "rows 8x8 | inner_step:1 | mean_square:0 return_loss:0 | | 4 | 'fsdp'",
    # below autograd, dropout is a bernoulli draw, which the fuzzer's own reference did not know
    "dropout": "ids 2x6 | embedding_of_two:558 inner_step:581 dropout:193 | weighted_sum:0 return_loss_and_value:973 | | 2 | random_plan('w2', 397)",
    "slopes": "rows 8x8 | linear:1 slopes:1 | mean_square:0 return_loss:0 | | 4 | 'auto'",
    "along_a_line": "rows 8x8 | linear:1 along_a_line:1 | mean_square:0 return_loss:0 | | 4 | random_plan('w2.x2', 2)",
    "noise": "rows 8x8 | linear:1 noise:1 | mean_square:0 return_loss:0 | | 4 | random_plan('w2.x2', 3)",
    "reparametrised": "rows 8x8 | reparametrised:1 | mean_square:0 return_loss:0 | | 4 | 'fsdp'",
    # a draw that nothing uses is not in the graph, but in the module that the fuzzer runs
    "noise_by_timestep": "sequences 6x8x9 | linear:1 reparametrised:423 noise_by_timestep:755 | mean_square:0 return_no_loss:71 | | 3 | autopar.Grid2D(3, 1, 'column')",
    "timestep": "rows 8x8 | linear:1 timestep:1 | mean_square:0 return_loss:0 | | 4 | 'fsdp'",
    "uniform_noise": "rows 8x8 | linear:1 uniform_noise:1 | mean_square:0 return_loss:0 | | 4 | random_plan('w2.x2', 4)",
    "coin": "rows 8x8 | linear:1 coin:1 | mean_square:0 return_loss:0 | | 4 | 'auto'",
    "gumbel": "rows 8x8 | linear:1 gumbel:1 | weighted_sum:0 return_loss:0 | | 4 | random_plan('w2.x2', 5)",
    # the fuzzer's own reference took the seeds of four draws in another order than the module
    "permuted_rows": "sequences 12x8x4 | noise:106 noise_by_timestep:321 linear:1 positive:812 permuted_rows:695 | norm_loss:516 return_loss:412 | | 4 | 'fsdp'",
}

GLOO = (
    # two results shared memory past a change of state, whose backward AOTAutograd then left out
    "ids 4x6 | embedding:817 mlp:1 logsumexp:323 | causal_loss:83 return_loss_and_detached:42 | | 4 | random_plan('w4', 977)",
    # modelled buckets waited for one another
    "sequences 2x6x4 | linear:1 frozen:971 linear:221 | with_weight_decay:367 return_loss_and_detached:167 | | 4 | 'atp'",
    # gloo was given complex numbers
    "sequences 12x3x12 | top_expert:257 fft:220 gqa:410 | mean_square:0 return_loss_and_other:250 | | 4 | autopar.Grid4D(x=2, y=1, z=1, data=2)",
    "rows 12x8 | linear:1 mlp:3 | mean_square:0 return_loss:0 | | 4 | 'ddp'",
    "sequences 4x4x8 | linear:1 attention:3 swiglu:5 | cross_entropy:1 return_loss:0 | | 4 | 'auto'",
    "sequences 4x4x8 | layer_norm:1 gqa:3 | mean_square:0 return_loss_and_value:0 | | 4 | 'megatron'",
    "sequences 4x3x8 | linear:1 | mse_of_transposed:0 return_loss:0 | | 4 | 'ddp'",
    "sequences 4x4x8 | dropout:1 swiglu:1 | mean_square:0 return_loss:0 | | 4 | 'fsdp'",
    "images 4x4x4x4 | conv2d:1 batch_norm_2d:1 | mean_square:0 return_loss:0 | | 4 | random_plan('w2.x2', 2)",
    # all habits
    "rows 8x8 | linear:1 switched:1 batch_norm:2 | mean_square:0 return_loss:0 | | 4 | 'megatron' | mode:1 attribute:1 batch:3 freeze:4 evaluate:5",
    "rows 4x8 | mlp:1 dropout_module:1 argument:1 | cross_entropy:1 return_loss_and_value:0 | input_gradient | 4 | 'fsdp' | number:1 number:2 init:6 write:0 data:3 mode:7 attribute:2",
)
