"""gcp-storage-emulator in a process of its own, with the precondition that it leaves out:
`ifGenerationMatch=0` on an object that is there answers 412, as
https://cloud.google.com/storage/docs/request-preconditions says.

python gcs_emulator.py PORT BUCKET
"""

from __future__ import annotations

import sys
from http import HTTPStatus
from http.server import HTTPServer
from typing import Any

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import create_server


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


if __name__ == "__main__":
    objects._media_upload = conditional(objects._media_upload)
    objects._multipart_upload = conditional(objects._multipart_upload)
    HTTPServer.request_queue_size = 128  # 5 would have clients wait a second to connect again
    create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket=sys.argv[2]).run()
