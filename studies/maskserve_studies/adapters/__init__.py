"""Costs of LoRAs and ControlNets, compared with Katz."""
