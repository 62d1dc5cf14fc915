"""The path of an edit from admission to its answer: cost, queue, choice of a worker, retries."""
