"""A fault in a plan, or in what runs it, turns the gate's cell red: ``-m "h200 or selftest"``.

The same cells of the same rows are green without it. On a target without a GPU nothing of this is
collected.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gptneo_trt.targets import gpu_mismatch
from tests.gate.measurer import Measurer, Setup
from tests.selftest.bench import FLAVOUR
from tests.selftest.engine_bench import BUILDERS, ROWS, EngineBench, seed_workers
from tests.selftest.engine_faults import ENGINE_FAULTS

pytestmark = pytest.mark.selftest


@pytest.fixture(scope="module")
def asked(request):
    """Return the faults that are selected, so that no other plan is built."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    names = {spec.params["fault"].name for spec in specs if spec and "fault" in spec.params}
    return [fault for fault in ENGINE_FAULTS if fault.name in names]


@pytest.fixture(scope="module")
def engine_bench(pytestconfig, target, gpu, asked, tmp_path_factory):
    """Return what runs engines with and without a fault; plans and interpreters run ahead."""
    wrong = gpu_mismatch(target, gpu)
    if wrong:
        pytest.fail(wrong, pytrace=False)
    threads, cache = torch.get_num_threads(), pytestconfig.getoption("--gate-cache")
    setup = Setup("bundled", FLAVOUR, "bundled", cache, keep_logits=True)
    with (
        Measurer(setup, len(ROWS)) as measurer,
        ThreadPoolExecutor(BUILDERS) as pool,
        pytest.MonkeyPatch.context() as patch,
    ):
        seed_workers(patch, ENGINE_FAULTS)
        folder = tmp_path_factory.mktemp("engine-faults")
        bench = EngineBench(cache, folder, target, gpu, measurer.result)
        for row in ROWS:
            measurer.submit(row, bench.scales if row.quantized else None)
        bench.build_ahead(pool, asked)
        yield bench
        pool.shutdown(cancel_futures=True)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("fault", ENGINE_FAULTS, ids=lambda fault: fault.name)
def test_fault_turns_its_cell_red(fault, engine_bench, expect_caught):
    """The cell that is there to catch a fault does, on engines."""
    expect_caught(fault, engine_bench.cells_with(fault), engine_bench.cells_without(fault))
