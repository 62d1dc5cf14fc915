"""What one worker's processes share: scheduling, status, admission, liveness, logs."""
