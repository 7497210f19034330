"""What is no HTTP gets its 400 and no traceback in the log, which anybody could fill so."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError


def keep_out_of_log() -> None:
    logging.getLogger("aiohttp.server").addFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
