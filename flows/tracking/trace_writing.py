"""Write trajectories to MLflow as traces that already happened, each once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flows.tracking.outbox import OutboxMessage

if TYPE_CHECKING:
    from mlflow.entities import Assessment, TraceInfo
    from mlflow.entities import Span as StoredSpan
    from mlflow.tracking import MlflowClient

    from flows.tracking.traces import MlflowTrace, Span

WITH_SPANS = "tags.`mlflow.trace.spansLocation` = 'TRACKING_STORE'"  # true once it has spans
ENTITIES_PER_BATCH = 100  # MLflow's limit for parameters, tags, and traces that a run links to


def write_traces(client: MlflowClient, run_id: str, uri: str, message: OutboxMessage) -> None:
    """Write those of a message's traces that the store does not have yet.

    MLflow's own tracing hides errors and draws random ids. The two lower-level calls used here
    raise errors, and may be repeated, because ids are derived from the trace's key. The spans of
    all traces come last, in one transaction (spans first would cost three times as much): a trace
    counts as written once it has spans, so one that a killed process left without is completed.
    """
    from mlflow.tracing.client import TracingClient

    traces = [_as_trace(fields) for fields in message.fields["traces"]]
    experiment = client.get_run(run_id).info.experiment_id
    store = TracingClient(uri)
    for start in range(0, len(traces), ENTITIES_PER_BATCH):
        batch = traces[start : start + ENTITIES_PER_BATCH]
        written = _finished(client, experiment, batch)
        client.link_traces_to_run([i for i, run in written.items() if run != run_id], run_id)
        missing = [trace for trace in batch if _trace_id(trace) not in written]
        for trace in missing:
            store.start_trace(_trace_info(trace, experiment, run_id))
        store.log_spans(experiment, [span for trace in missing for span in _stored_spans(trace)])


def _as_trace(fields: Mapping[str, Any]) -> MlflowTrace:
    """Return the trace that ``asdict``, or JSON made of it, describes."""
    # imported here: it imports numpy, which runs without traces do not need
    from flows.tracking.traces import MlflowTrace, Span

    trace = MlflowTrace(**fields)
    parts = tuple(Span(**part) for part in fields["spans"])
    return replace(trace, spans=parts, accepted=tuple(trace.accepted))


def _finished(
    client: MlflowClient, experiment: str, traces: Sequence[MlflowTrace]
) -> dict[str, str | None]:
    """Return the ids of the traces that have been written whole -> the run that wrote them."""
    keys = ", ".join(f"'{trace.key}'" for trace in traces)
    entries = client.search_traces(
        locations=[experiment],
        filter_string=f"attributes.client_request_id IN ({keys}) AND {WITH_SPANS}",
        max_results=len(traces),
        include_spans=False,
    )
    return {
        entry.info.trace_id: entry.info.trace_metadata.get("mlflow.sourceRun") for entry in entries
    }


def _trace_id(trace: MlflowTrace) -> str:
    return f"tr-{trace.key}"


def _trace_info(trace: MlflowTrace, experiment: str, run_id: str) -> TraceInfo:
    """Return what MLflow keeps of a trace beside its spans, and finds it by."""
    from mlflow.entities import TraceInfo, TraceLocation, TraceState

    whole = trace.spans[0]
    return TraceInfo(
        trace_id=_trace_id(trace),
        client_request_id=trace.key,
        trace_location=TraceLocation.from_experiment_id(experiment),
        request_time=trace.began,
        execution_duration=whole.end - whole.start,
        state=TraceState.OK if whole.sound else TraceState.ERROR,
        request_preview=trace.question,
        response_preview=trace.answer,
        trace_metadata={"mlflow.sourceRun": run_id},
        tags={**trace.tags, "mlflow.traceName": trace.name},
        assessments=_assessments(trace),
    )


def _assessments(trace: MlflowTrace) -> list[Assessment]:
    """Return reward, success and outcome as feedback, the gold answer as an expectation."""
    from mlflow.entities import AssessmentSource, Expectation, Feedback

    source = AssessmentSource(source_type="CODE", source_id="tasks/reward.py")
    known: dict[str, Any] = {
        "source": source,
        "trace_id": _trace_id(trace),
        "create_time_ms": trace.began,
        "last_update_time_ms": trace.began,
    }
    entries: list[Assessment] = [
        Feedback(name, value, rationale=trace.reason, **known)
        for name, value in trace.feedback.items()
    ]
    if trace.accepted:
        forms = list(trace.accepted)
        entries.append(Expectation("answer", forms if forms[1:] else forms[0], **known))
    for entry in entries:  # a derived id, or a second attempt would add it again
        entry.assessment_id = f"a-{_digits(trace.key, entry.name, 32)}"
    return entries


def _stored_spans(trace: MlflowTrace) -> list[StoredSpan]:
    """Return the spans in MLflow's own form, parents first."""
    from mlflow.entities import Span as StoredSpan

    whole = _digits(trace.key, "0", 16)
    return [
        StoredSpan.from_dict(_span_fields(trace, span, number, whole))
        for number, span in enumerate(trace.spans)
    ]


def _span_fields(trace: MlflowTrace, span: Span, number: int, whole: str) -> dict[str, Any]:
    """Return one span as MLflow writes it to JSON; ``whole`` is the id of the first one."""
    attributes = {
        "mlflow.traceRequestId": _trace_id(trace),
        "mlflow.spanType": span.kind,
        "mlflow.spanInputs": span.inputs,
        "mlflow.spanOutputs": span.outputs,
        "outcome": span.outcome,
        **span.attributes,
    }
    if span.kind == "CHAT_MODEL":
        read, wrote = span.attributes["tokens_read"], span.attributes["tokens"]
        usage = {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote}
        attributes |= {"mlflow.chat.tokenUsage": usage, "mlflow.message.format": "openai"}
    return {
        "trace_id": _trace_id(trace),
        "span_id": _digits(trace.key, str(number), 16),
        "parent_span_id": whole if number else None,
        "name": span.name,
        "start_time_unix_nano": (trace.began + span.start) * 1_000_000,
        "end_time_unix_nano": (trace.began + span.end) * 1_000_000,
        "status": {"code": "OK"} if span.sound else {"code": "ERROR", "message": span.outcome},
        "attributes": {
            name: json.dumps(value, ensure_ascii=False) for name, value in attributes.items()
        },
        "events": [],
        "links": [],
    }


def _digits(key: str, name: str, count: int) -> str:
    """Return ``count`` hexadecimal digits derived from a key and a name below it."""
    return hashlib.blake2b(f"{key}/{name}".encode(), digest_size=count // 2).hexdigest()
