"""The fields that KubeRay's resources have, with their types, and a check of manifests against them.

They are those of the operator's API types, which its custom resource definitions are generated from
(`ray-operator/apis/ray/v1/{raycluster,rayjob}_types.go` of ray-project/kuberay at commits 3275ee0 and f6ef3f7, of v1.4), and of its CRD
reference for v1.6.2 (https://docs.ray.io/en/master/cluster/kubernetes/references/api.html) for what came later: `authOptions`, and
the mode `SidecarMode`. Of pods only fields of our manifests are here; the rest is Kubernetes' own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

INT32_MAX = 2**31 - 1
QUANTITY = re.compile(
    r"(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?"
)
"""Quantity of memory and CPUs, as in a resource definition."""


@dataclass(frozen=True)
class Fields:
    """A mapping with these fields and no others."""

    types: Mapping[str, Any]
    needed: frozenset[str] = field(default_factory=frozenset)


def fields(*needed: str, **types: Any) -> Fields:
    return Fields(types, frozenset(needed))


class OneOf(tuple[str, ...]):
    """One of these words."""


class MapOf:
    """A mapping of strings to values of one type."""

    def __init__(self, of: Any) -> None:
        self.of = of


QUANTITIES = MapOf(QUANTITY)
RESOURCES = fields(requests=QUANTITIES, limits=QUANTITIES, claims=list)
CONTAINER = fields(
    "name",
    name=str,
    image=str,
    imagePullPolicy=str,
    command=[str],
    args=[str],
    env=[fields("name", name=str, value=str, valueFrom=dict)],
    ports=[fields("containerPort", containerPort=int, name=str, protocol=str)],
    resources=RESOURCES,
    volumeMounts=[fields("name", "mountPath", name=str, mountPath=str, subPath=str, readOnly=bool)],
)
VOLUME = fields(
    "name",
    name=str,
    persistentVolumeClaim=fields("claimName", claimName=str, readOnly=bool),
    emptyDir=fields(medium=str, sizeLimit=QUANTITY),
)
POD = fields(metadata=dict, spec=fields("containers", containers=[CONTAINER], volumes=[VOLUME], restartPolicy=str))
HEAD = fields(
    "template",
    template=POD,
    headService=dict,
    enableIngress=bool,
    rayStartParams=MapOf(str),
    serviceType=OneOf(("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")),
)
WORKERS = fields(
    *("groupName", "minReplicas", "maxReplicas", "template"),
    suspend=bool,
    groupName=str,
    replicas=int,
    minReplicas=int,
    maxReplicas=int,
    idleTimeoutSeconds=int,
    rayStartParams=MapOf(str),
    template=POD,
    scaleStrategy=fields(workersToDelete=[str]),
    numOfHosts=int,
)
CLUSTER = fields(
    "headGroupSpec",
    suspend=bool,
    managedBy=OneOf(("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")),
    autoscalerOptions=fields(
        resources=RESOURCES,
        image=str,
        imagePullPolicy=str,
        securityContext=dict,
        idleTimeoutSeconds=int,
        upscalingMode=OneOf(("Default", "Aggressive", "Conservative")),
        env=list,
        envFrom=list,
        volumeMounts=list,
    ),
    headServiceAnnotations=MapOf(str),
    enableInTreeAutoscaling=bool,
    gcsFaultToleranceOptions=dict,
    headGroupSpec=HEAD,
    rayVersion=str,
    workerGroupSpecs=[WORKERS],
    authOptions=fields(mode=OneOf(("disabled", "token")), secretName=str, enableK8sTokenAuth=bool),
)
JOB = fields(
    activeDeadlineSeconds=int,
    backoffLimit=int,
    rayClusterSpec=CLUSTER,
    submitterPodTemplate=POD,
    metadata=MapOf(str),
    clusterSelector=MapOf(str),
    submitterConfig=fields(backoffLimit=int),
    managedBy=OneOf(("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")),
    entrypoint=str,
    runtimeEnvYAML=str,
    jobId=str,
    submissionMode=OneOf(("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")),
    entrypointResources=str,
    entrypointNumCpus=float,
    entrypointNumGpus=float,
    ttlSecondsAfterFinished=int,
    shutdownAfterJobFinishes=bool,
    suspend=bool,
)
CLAIM = fields("accessModes", "resources", accessModes=[str], resources=RESOURCES, storageClassName=str)
SCHEMAS = {
    ("ray.io/v1", "RayCluster"): CLUSTER,
    ("ray.io/v1", "RayJob"): JOB,
    ("v1", "PersistentVolumeClaim"): CLAIM,
}


def problems(value: Any, schema: Any, place: str = "spec") -> Iterator[str]:
    """Return the positions of values that violate the schema: another type, an unknown field, a missing one."""
    match schema:
        case Fields(types, needed) if isinstance(value, Mapping):
            yield from (f"{place}.{name} is unknown" for name in value.keys() - types.keys())
            yield from (f"{place}.{name} is missing" for name in needed - value.keys())
            for name in value.keys() & types.keys():
                yield from problems(value[name], types[name], f"{place}.{name}")
        case MapOf() if isinstance(value, Mapping):
            for name, item in value.items():
                yield from problems(item, schema.of, f"{place}.{name}")
        case list() if isinstance(value, list):
            for number, item in enumerate(value):
                yield from problems(item, schema[0], f"{place}[{number}]")
        case _ if not _is(value, schema):
            yield f"{place}={value!r} is no {_name(schema)}"


def _is(value: Any, schema: Any) -> bool:
    """Return whether a single value matches the schema; a mapping or list in its place does not."""
    match schema:
        case OneOf():
            return value in schema
        case re.Pattern():
            return isinstance(value, str | int) and schema.fullmatch(str(value)) is not None
        case type() if schema is int:
            return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INT32_MAX
        case type():
            return isinstance(value, schema) or (schema is float and isinstance(value, int))
    return False


def _name(schema: Any) -> str:
    match schema:
        case OneOf():
            return f"word of {', '.join(schema)}"
        case re.Pattern():
            return "quantity"
        case type():
            return schema.__name__
    return "list" if isinstance(schema, list) else "mapping"
