"""Server reflection for both APIs. The two live in different descriptor pools; this joins them in a third."""

from collections.abc import Iterable

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from protos import encoder_pb2, open_inference_pb2


def reflection_servicer() -> ReflectionServicer:
    """A servicer that describes every service of this server, itself included."""
    files: Iterable[FileDescriptor] = [
        module.DESCRIPTOR for module in (encoder_pb2, open_inference_pb2, health_pb2, reflection_pb2)
    ]
    pool = DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.serialized_pb)
    names = [service.full_name for file in files for service in file.services_by_name.values()]
    return ReflectionServicer(names, pool=pool)
