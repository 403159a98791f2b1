"""PPO and its critic-free forms (GRPO, RLOO, Dr.GRPO, DAPO): they differ in config only."""
