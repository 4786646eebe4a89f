"""Pretrain text encoders with [MASK] kept out of the encoder until late."""
