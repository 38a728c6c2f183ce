"""The model's operations, once for every kind of device. `make_ops` in ops/select.py chooses one."""
