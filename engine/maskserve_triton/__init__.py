"""The Python side of the Triton models, with Triton's API handed in.

Only a `model.py` may import triton_python_backend_utils; it passes the module on as `api`. So all
of this runs in tests against a small fake.
"""
