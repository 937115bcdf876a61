"""The cluster the other tests here stand on."""

import pytest

pytestmark = pytest.mark.slurm


def test_two_nodes_run_one_task_each(slurm, tmp_path):
    output = tmp_path / "out.log"
    job = slurm.submit(
        "--nodes=2", "--ntasks-per-node=1", f"--output={output}", "--wrap=srun printenv SLURM_PROCID SLURMD_NODENAME"
    )
    assert slurm.wait(job, seconds=30) == "COMPLETED"
    assert sorted(output.read_text().split()) == ["0", "1", "node1", "node2"]


def test_cancelled_job_says_so(slurm, tmp_path):
    job = slurm.submit(f"--output={tmp_path}/out.log", "--wrap=srun sleep 60")
    slurm.wait_until(lambda: slurm.state(job) == "RUNNING", "start", 30)
    slurm.call("scancel", job)
    assert slurm.wait(job, seconds=30) == "CANCELLED"
