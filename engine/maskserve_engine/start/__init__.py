"""How engines are put together, and how a CPU's cores are shared among processes."""
