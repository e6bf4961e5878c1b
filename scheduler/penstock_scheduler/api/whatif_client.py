"""The part of the API's client that replays recorded history."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from penstock_scheduler.api.whatif_messages import WhatIfOrder, WhatIfTask

Answer = TypeVar("Answer", bound=BaseModel)


class WhatIfCalls(abc.ABC):
    """Replays of recorded history. For operators."""

    @abc.abstractmethod
    def _ask(
        self,
        model: type[Answer],
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        query: Mapping[str, Any] | None = None,
        again: bool = False,
    ) -> Answer: ...

    def whatif(self, order: WhatIfOrder) -> WhatIfTask:
        """Begin a replay. penstockd runs one at a time."""
        return self._ask(WhatIfTask, "POST", "/v1/whatif", body=order)

    def whatif_task(self, task: str) -> WhatIfTask:
        """A replay, with its result when it is done."""
        return self._ask(WhatIfTask, "GET", f"/v1/whatif/{task}", again=True)

    def end_whatif(self, task: str) -> WhatIfTask:
        """Cancel a replay, or forget one that has ended."""
        return self._ask(WhatIfTask, "DELETE", f"/v1/whatif/{task}")
