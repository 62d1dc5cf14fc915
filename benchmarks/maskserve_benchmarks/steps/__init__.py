"""Steps of models with random weights: rigs, times and replays."""
