"""Reading in batches: the reader, its options, its order and states, its passes."""
