"""The names of torch_xla's C++ module ``_XLAC``, by what they are about."""
