"""What a run says about itself: metrics to JSON Lines, wandb and the terminal, and the report of a finished or running run."""
