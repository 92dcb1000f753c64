"""The server's app: a backend, a tokenizer and settings become an ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client.exposition import choose_encoder
from starlette.middleware.cors import CORSMiddleware

import pagedserve
from pagedserve.engine.server import errors, live_routes, routes
from pagedserve.engine.server.answer import as_json
from pagedserve.engine.server.backend import EngineBackend
from pagedserve.engine.server.document import document
from pagedserve.engine.server.exposition import registry_of
from pagedserve.engine.server.front import FrontEnd
from pagedserve.engine.server.guards import Guard
from pagedserve.engine.server.live import LiveFeed
from pagedserve.engine.server.prompts import PromptCodec
from pagedserve.engine.server.settings import ServerSettings

router = APIRouter()


def make_app(backend: EngineBackend, tokenizer: Any, settings: ServerSettings) -> FastAPI:
    """An app that serves ``backend``; its `FrontEnd` is ``app.state.front``, its `LiveFeed` ``app.state.live``.

    ``tokenizer``: a Hugging Face fast tokenizer, the model's. ValueError says what is wrong with it.
    """
    # No pages that load scripts from elsewhere, no redirects to a host that a request names.
    app = FastAPI(
        title="PagedServe",
        version=pagedserve.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.front = front = FrontEnd(
        backend, PromptCodec(tokenizer, backend.facts.limits.max_model_len), settings
    )
    app.state.registry = registry_of(front)
    app.state.live = LiveFeed(front)
    errors.install(app)
    document(app)
    app.add_middleware(Guard, settings=settings, responses=front.counts.responses)
    if settings.allowed_origins:
        # Before the guard: a browser asks whether it may ask without the key.
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.include_router(router)
    app.include_router(routes.router)
    app.include_router(live_routes.router)
    return app


@router.get("/health")
async def health(request: Request) -> Response:
    """200 as long as new requests are taken, else 503 with the reason."""
    error = routes.front_of(request).closed_by
    return (
        error.response() if error is not None else Response(b'{"status":"ok"}', media_type="application/json")
    )


@router.get("/version")
async def version() -> Response:
    """The version of this software."""
    return Response(as_json({"version": pagedserve.__version__}), media_type="application/json")


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The served names, all of them of one model."""
    front = routes.front_of(request)
    names = front.settings.model_names
    about = {"object": "model", "created": front.created, "owned_by": "pagedserve", "root": names[0]}
    limit = {"parent": None, "max_model_len": front.backend.facts.limits.max_model_len}
    data = [{"id": name, **about, **limit} for name in names]
    return Response(as_json({"object": "list", "data": data}), media_type="application/json")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Everything measured, in Prometheus' text format or OpenMetrics, as asked for."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.app.state.registry), headers={"content-type": content_type})
