"""Block tables, the pools of blocks and slots behind them, and prefixes that are already computed."""
