"""What several figures share: reading the store, telling repeats apart, the paper's numbers, and pieces of charts."""
