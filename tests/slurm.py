"""The environment variables by which a task of Slurm's knows its place."""

from __future__ import annotations


def slurm_variables(num_tasks: int, rank: int, nodes: str) -> dict[str, str]:
    """Return what `srun --ntasks-per-node=1` sets for one of its tasks."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
    }
