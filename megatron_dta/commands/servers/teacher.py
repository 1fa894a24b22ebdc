"""Serves a frozen teacher to training runs: its own checkpoint, processes and mesh, on these or other GPUs.

    torchrun --nproc-per-node 4 -m megatron_dta teacher --load-hf models/Qwen3-32B --bf16 \\
        --tensor-model-parallel-size 4 --sequence-parallel --port 8100
    megatron-dta train ... --teacher-load-hf http://127.0.0.1:8100

The samples of a request are one prefix forest, computed in one forward-only pass. The server listens on loopback unless
--host says otherwise. Its key comes from MEGATRON_DTA_TEACHER_KEY, which the run needs, too; without the variable there
is no key, which is allowed only on an address of this machine.
"""

from __future__ import annotations

import hmac
import math
import os
import queue
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.config.checks.all import check_engine
from megatron_dta.training.megatron_args import MESH, ToolFlags, passed_over
from megatron_dta.training.monitor.stop_signals import kept_signals

if TYPE_CHECKING:
    import numpy as np

    from megatron_dta.core.engine import TreeEngine
    from megatron_dta.training.config import TrainConfig

FLAGS = ToolFlags(
    "megatron-dta teacher", ("model", "tree"), f"{MESH} load_hf hf_checkpoint skip_checkpoint_checks seed"
)
KEY = "MEGATRON_DTA_TEACHER_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_IDLE_S = 0.05


def main() -> None:
    """Read the flags, load the teacher on all ranks, and serve until SIGINT or SIGTERM."""
    parser = CommandLineParser(__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8100, help="port; 0 for any free one (default: %(default)s)")
    parser.add_argument("--max-body-mib", type=int, default=1024, help="longest request (default: %(default)s)")
    options, others = parser.parse_known_args()
    if not 0 <= options.port < 2**16:
        raise InputError(f"--port {options.port}: must be a port, 0 to 65535")
    if options.host not in _LOOPBACK and len(os.environ.get(KEY, "")) < 16:
        raise InputError(
            f"--host {options.host}: others may reach it, so {KEY} must hold a key of 16 characters or more"
        )
    config, left_out = FLAGS.parse(others)
    if config.checkpoint.load_hf is None:
        raise InputError("--load-hf is missing: the teacher's checkpoint")
    if config.tree.tree_memory_gib is not None:
        raise InputError("--tree-memory-gib plans training steps; leave it out, or give --tree-segment-tokens")
    check_engine(config)
    if left_out and os.environ.get("RANK", "0") == "0":
        print(passed_over(left_out))
    _serve(config, options)


@dataclass
class _Job:
    """A request to the ranks: ``kind`` is logprobs or rows."""

    kind: str
    arrays: dict[str, np.ndarray]
    temperature: float
    result: Future


def _serve(config: TrainConfig, options: Any) -> None:
    import torch

    from megatron_dta.core.engine import TreeEngine
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import current_mesh, initialize_parallel
    from megatron_dta.training.huggingface.save import load_hf

    device = initialize_parallel(config.optimization.seed, config.parallel)
    mesh = current_mesh()
    if mesh.data_size > 1:
        raise InputError(
            f"{mesh.world_size} processes are {mesh.data_size} replicas; a teacher is one: change the mesh"
        )
    model = build_model(config.model, device, config.parallel)
    load_hf(config, model)
    model.requires_grad_(False).eval()
    engine = TreeEngine(model, 1.0, config.tree.logprob_chunk_tokens, config.tree.tree_attention_impl)
    head = _whole_head(engine)
    jobs: queue.Queue[_Job] = queue.Queue()
    signals, server = kept_signals(), None
    if mesh.rank == 0:
        server = _server(config, engine, head, jobs, options)
        print(f"teacher: {server.url}, {(os.environ.get(KEY) and 'with a key') or 'without a key'}", flush=True)
    try:
        while _work(engine, config, jobs, signals):
            pass
    finally:
        if server is not None:
            server.close()
    torch.distributed.destroy_process_group()


def _work(engine: TreeEngine, config: TrainConfig, jobs: queue.Queue[_Job], signals: list[int]) -> bool:
    """Do the next job on all ranks; False when the server ends."""
    mesh, job, request = engine.mesh, None, None
    if mesh.rank == 0:
        try:
            job = jobs.get(timeout=_IDLE_S)
            request = (job.kind, job.arrays, job.temperature)
        except queue.Empty:
            request = "end" if signals else None
    request = mesh.from_first(request)
    if request is None or request == "end":
        return request is None
    try:
        result = _compute(engine, config, *request)
    except Exception as error:
        if job is not None:
            job.result.set_exception(error)
        raise
    if job is not None:
        job.result.set_result(result)
    return True


def _compute(
    engine: TreeEngine, config: TrainConfig, kind: str, arrays: dict[str, np.ndarray], temperature: float
) -> dict[str, np.ndarray]:
    """The arrays of the reply, complete on rank 0."""
    import numpy as np

    from megatron_dta.extras.teachers.samples import tensor_bytes, unpack_samples
    from megatron_dta.training.teachers import rows_of_pairs, teacher_batch

    samples = unpack_samples(arrays, engine.true_vocab_size, config.model.max_position_embeddings)
    batch = teacher_batch(engine, samples, config.tree)
    engine.temperature = temperature
    if kind == "logprobs":
        values = engine.compute_logprobs(batch)
        return {"logprobs": np.concatenate([v[s.loss_mask] for v, s in zip(values, samples, strict=True)])}
    states = engine.compute_row_states(batch)
    content = None if states is None else tensor_bytes(states)[0]
    if engine.mesh.pipeline_size > 1:
        content = engine.mesh.from_last_stage(content)
    return {"row": rows_of_pairs(batch), "states": content}


def _whole_head(engine: TreeEngine) -> tuple[np.ndarray, str, bool]:
    """The output weight of all ranks as bytes, its dtype, and whether its logits are float32; the same on all ranks."""
    import torch

    from megatron_dta.extras.teachers.samples import tensor_bytes

    part, mesh, shard = engine.tree_models[-1], engine.mesh, None
    if part.post_process:
        shard = (mesh.tensor_rank, *tensor_bytes(part.output_weight()), part.fp32_lm_head)
    parts = [shard] if mesh.replica_group is None else mesh.gather_over_replica(shard)
    parts = sorted((entry for entry in parts if entry is not None), key=lambda entry: entry[0])
    head = torch.cat([torch.from_numpy(values) for _, values, _, _ in parts]).numpy()
    return head, parts[0][2], parts[0][3]


def _server(
    config: TrainConfig, engine: TreeEngine, head: tuple[np.ndarray, str, bool], jobs: queue.Queue[_Job], options: Any
) -> Any:
    """Listen; the routes check requests, and the ranks compute one at a time."""
    import asyncio

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from megatron_dta.extras.agents.gateway.errors import RequestError, refuse
    from megatron_dta.extras.agents.gateway.http.bodies import BodyBudget, limited_body
    from megatron_dta.extras.agents.gateway.http.server import GatewayServer, check_packages
    from megatron_dta.extras.teachers.array_message import pack, unpack
    from megatron_dta.extras.teachers.samples import TeacherFacts, digest, digest_array, unpack_samples

    check_packages("megatron-dta teacher")
    key, one_at_a_time = os.environ.get(KEY, ""), asyncio.Lock()
    most = options.max_body_mib * 2**20
    budget = BodyBudget(2 * most)

    def guarded(call: Any) -> Any:
        async def answer(request: Request) -> Response:
            bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
            try:
                if not hmac.compare_digest(bearer.encode("utf-8", "replace"), key.encode()):
                    raise RequestError(401, f"the key is not that of {KEY}")
                return await call(request)
            except RequestError as error:
                return JSONResponse({"error": {"message": error.message}}, error.status)

        return answer

    facts = TeacherFacts(
        engine.true_vocab_size, engine.config.hidden_size, head[1], bool(head[2]), digest(head[0].reshape(-1).data)
    )

    async def about(request: Request) -> Response:
        return JSONResponse(asdict(facts))

    async def weights(request: Request) -> Response:
        return Response(pack({"head": head[0]}))

    async def score(request: Request) -> Response:
        kind = request.url.path.rpartition("/")[2]
        try:
            temperature = float(request.query_params.get("temperature", "1"))
            body = await limited_body(request, most, budget)
            arrays = unpack(body)
            unpack_samples(arrays, engine.true_vocab_size, config.model.max_position_embeddings)
        except ValueError as error:
            raise refuse(str(error)) from error
        if not (math.isfinite(temperature) and temperature > 0):
            raise refuse("temperature: must be finite and above 0")
        job = _Job(kind, arrays, temperature, Future())
        async with one_at_a_time:
            jobs.put(job)
            scores = await asyncio.wrap_future(job.result)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return Response(pack({**scores, "reply_to": digest_array(digest(facts.head_digest, target, body))}))

    routes = [Route(f"/v1/{name}", guarded(score), methods=["POST"]) for name in ("logprobs", "rows")]
    routes += [Route("/v1/teacher", guarded(about)), Route("/v1/head", guarded(weights))]
    return GatewayServer(Starlette(routes=routes), options.host, options.port, 256)
