"""Operations on all workers: templates, LoRAs, cancels, counters."""
