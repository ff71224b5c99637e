"""Step time on real ranks: autopar against what people use, and what each part of it gains."""
