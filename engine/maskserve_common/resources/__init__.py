"""Resource cache: the LoRAs, ControlNets and templates that edits need on a host or a device."""
