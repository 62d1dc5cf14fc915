"""Costs of LoRAs and ControlNets, beside Katz."""
