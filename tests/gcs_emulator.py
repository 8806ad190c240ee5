"""gcp-storage-emulator in a process of its own, with what it leaves out: `ifGenerationMatch=0` on an
object that is there answers 412, as https://cloud.google.com/storage/docs/request-preconditions
says, an object comes with the header x-goog-generation, which Google's own client reads
(google.cloud.storage.blob.Blob._extract_headers_from_download), and one that is stored packed is told
as that to who accepts it (https://cloud.google.com/storage/docs/transcoding).

python gcs_emulator.py PORT BUCKET
"""

from __future__ import annotations

import contextlib
import sys
from http import HTTPStatus
from http.server import HTTPServer
from typing import Any

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects


def conditional(upload: Any) -> Any:
    def checked(request: Any, response: Any, storage: Any) -> None:
        if request.query.get("ifGenerationMatch") == ["0"]:
            data = request.data
            name = request.query["name"][0] if "name" in request.query else data["meta"].get("name")
            try:
                storage.get_file_obj(request.params["bucket_name"], name)
            except NotFound:
                pass
            else:
                response.status = HTTPStatus.PRECONDITION_FAILED
                return
        upload(request, response, storage)

    return checked


def with_generation(request: Any, response: Any, storage: Any, *args: Any) -> None:
    params = request.params
    with contextlib.suppress(NotFound):
        found = storage.get_file_obj(params["bucket_name"], params["object_id"])
        response["x-goog-generation"] = found["generation"]
        if "gzip" in request.get_header("accept-encoding", "") and "contentEncoding" in found:
            response["Content-Encoding"] = found["contentEncoding"]
    download(request, response, storage, *args)


download = objects.download

if __name__ == "__main__":
    objects.download = with_generation
    # it lists its handlers as it is imported
    from gcp_storage_emulator.server import create_server

    objects._media_upload = conditional(objects._media_upload)
    objects._multipart_upload = conditional(objects._multipart_upload)
    HTTPServer.request_queue_size = 128  # 5 would have clients wait a second to connect again
    create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket=sys.argv[2]).run()
