"""The environment variables that Slurm sets for a task."""

from __future__ import annotations


def slurm_variables(num_tasks: int, rank: int, nodes: str) -> dict[str, str]:
    """Return the variables that `srun --ntasks-per-node=1` sets for the task of a rank."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
    }
