#!/usr/bin/env python3
"""A cloud whose instances are lines of a JSON file, behind the contract of `[cloud.commands.NAME]`.

It is a complete example of such a command, and what the tests run. `capacity` and `faults` of the file are for the tests.
"""

import fcntl
import json
import pathlib
import sys
import time


def refuse(kind, message):
    print(json.dumps({"kind": kind, "message": message}))
    sys.exit(1)


def launch(cloud, asked):
    if asked["token"] in cloud["served"]:
        return {"instances": cloud["served"][asked["token"]]}
    alive = sum(not each["gone"] for each in cloud["instances"])
    if alive + len(asked["nodes"]) > cloud["capacity"]:
        refuse("no capacity", "all machines are taken")
    launched = {}
    for node in asked["nodes"]:
        launched[node] = f"vm-{len(cloud['instances'])}"
        cloud["instances"].append(
            {
                "id": launched[node],
                "state": "running",
                "instance_type": asked["instance_type"],
                "launched_s": time.time() + cloud["ahead_s"],
                "ended_s": None,
                "gone": False,
                "tags": {**asked["tags"], "node": node},
            }
        )
    cloud["served"][asked["token"]] = launched
    return {"instances": launched}


def listed(cloud, asked):
    if asked["ids"] is not None:
        found = [each for each in cloud["instances"] if each["id"] in asked["ids"]]
        return {"instances": found, "unknown": sorted(set(asked["ids"]) - {each["id"] for each in found})}
    mine = [each for each in cloud["instances"] if cloud["careless"] or each["tags"]["site"] == asked["site"]]
    return {"instances": [each for each in mine if asked["run"] in (None, each["tags"]["run"])]}


def terminate(cloud, asked):
    for each in cloud["instances"]:
        if each["id"] in asked["ids"] and not each["gone"]:
            each.update(state="ended", gone=True, ended_s=time.time() + cloud["ahead_s"])
    return {}


def main():
    path, verb = sys.argv[1:]
    asked = json.load(sys.stdin)
    with pathlib.Path(path).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cloud = json.load(file)
        fault = cloud["faults"].pop(verb, None)
        answer = {}
        if fault is None or fault.endswith("-after"):
            verbs = {"launch": launch, "list": listed, "terminate": terminate, "offers": lambda c, a: c["offers"]}
            answer = verbs.get(verb, lambda c, a: {})(cloud, asked)
        file.seek(0)
        file.truncate()
        json.dump(cloud, file)
    if fault in ("hangs", "hangs-after"):
        time.sleep(600)
    if fault == "crashes":
        raise SystemExit("the token of the cloud has expired")
    if fault == "babbles":
        print("Hello!")
        return
    if fault is not None:
        refuse(fault, "told by the test")
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
