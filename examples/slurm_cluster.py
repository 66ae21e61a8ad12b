"""Ingest a checkpoint on a Slurm cluster through Dask, with one worker for each GPU.

    pip install 'headatlas[dask]' dask-jobqueue
    python examples/slurm_cluster.py org/large-model /shared/atlas

Every job is a worker with one GPU, to which Slurm sets CUDA_VISIBLE_DEVICES; for CPU nodes leave `--gres` out.
Partition, account, memory and paths are those of no real cluster: change them to yours. The store, the checkpoint
and this environment have to be under the same paths on all nodes.
"""

import subprocess
import sys

from dask_jobqueue import SLURMCluster

GPUS = 8
THREADS = 4

model, store = sys.argv[1:]

cluster = SLURMCluster(
    queue="gpu",
    account="my-account",
    walltime="02:00:00",
    processes=1,
    cores=1,  # one unit at a time in a worker; its layers share the THREADS of --threads
    job_cpu=THREADS,
    memory="64GB",
    job_extra_directives=["--gres=gpu:1"],
    job_script_prologue=["export OMP_NUM_THREADS=1", "export HF_HOME=/shared/huggingface"],
)
cluster.scale(jobs=GPUS)

command = ["headatlas", "ingest", model, "--store", store]
command += ["--cluster", cluster.scheduler_address, "--workers", str(GPUS), "--threads", str(THREADS)]
status = subprocess.run(command).returncode

cluster.close()
sys.exit(status)
