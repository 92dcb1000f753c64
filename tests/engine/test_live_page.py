"""The live page's files over HTTP, and who may open them."""

import base64
import re
import tomllib
from pathlib import Path

import httpx2
from engine_serving import run
from server_apps import Running, running

from pagedserve.engine.server import live_routes
from pagedserve.engine.server.guards import BASIC_CHALLENGE
from pagedserve.engine.server.settings import ApiKeys

COMPLETIONS, EVENTS = "/v1/completions", "/live/events"
BODY = {"prompt": "abc", "max_tokens": 3}


def _basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()}


def test_a_browser_is_asked_for_a_key_and_may_give_it_as_a_password() -> None:
    pages = ("/", "/metrics", "/live/page.js", "/live/page.css")

    async def main(served: Running) -> None:
        wrong = [
            {},
            _basic("wrong"),
            _basic(""),
            {"Authorization": "Basic %"},
            {"Authorization": "Basic a2V5"},
        ]
        for headers in wrong:
            async with served.client(**headers) as http:
                for path in (*pages, EVENTS):
                    refused = await http.get(path)
                    assert refused.status_code == 401
                    assert BASIC_CHALLENGE in refused.headers.get_list("www-authenticate")
        for headers in (_basic("two:2"), {"Authorization": "Bearer two:2"}):
            async with served.client(**headers) as http:
                for path in pages:
                    assert (await http.get(path)).status_code == 200
        async with served.client(**_basic("two:2")) as http:
            # A browser sends a password along with what other sites make it ask for.
            for refused in (await http.post(COMPLETIONS, json=BODY), await http.get("/v1/models")):
                assert refused.status_code == 401
                assert refused.headers.get_list("www-authenticate") == ["Bearer"]
        assert served.front.counts.num_accepted == 0

    with running(api_keys=ApiKeys(["one", "two:2"])) as served:
        run(main(served))


def test_another_sites_page_may_not_take_a_place() -> None:
    async def main(served: Running) -> None:
        async with served.client(**{"sec-fetch-site": "cross-site"}) as http:
            refused = await http.get(EVENTS)
        assert refused.json()["error"]["code"] == "cross_site"
        assert refused.status_code == 403

    with running() as served:
        run(main(served))


def test_the_page_and_its_files_are_served_and_nothing_else() -> None:
    async def main(served: Running) -> dict[str, httpx2.Response]:
        async with served.client() as http:
            for path in (
                "/live/index.html",
                "/live/nothing.js",
                "/live/..%2fapp.py",
                "/live/../app.py",
                "/live/",
            ):
                assert (await http.get(path)).status_code == 404
            names = [path.name for path in live_routes.FOLDER.iterdir()]
            return {name: await http.get("/" if name == "index.html" else f"/live/{name}") for name in names}

    with running() as served:
        files = run(main(served))
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    for name, response in files.items():
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        assert "default-src 'none'" in response.headers["content-security-policy"]
    html = files["index.html"].text
    wanted = {path for path in re.findall(r'(?:src|href)="([^"]+)"', html) if not path.startswith("data:")}
    assert wanted == {"live/page.css", "live/page.js", "metrics"}
    scripts = {name: response.text for name, response in files.items() if name.endswith(".js")}
    imported = {name for text in scripts.values() for name in re.findall(r'from "\./(\w+\.js)"', text)}
    assert imported | {"page.js"} == set(scripts)
    for name, response in files.items():
        # The namespace of the icon is a name, not an address.
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//\w+\.", text), f"{name} names another host"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


def test_the_files_are_in_the_wheel() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["package-data"]["pagedserve.engine.server"] == ["page/*"]
