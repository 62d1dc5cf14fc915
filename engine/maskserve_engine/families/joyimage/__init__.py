"""JoyImage-Edit. Its blocks are FLUX.1's double ones."""
