//! What is said between the kubelet and the agent: messages of its device plugin API (v1beta1) and
//! of its list of pods with their devices (`PodResources` v1), and the calls to it.

use http::uri::PathAndQuery;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

/// How long a call to the kubelet may take.
const WITHIN: Duration = Duration::from_secs(10);

/// Version of the device plugin API.
pub(super) const VERSION: &str = "v1beta1";
/// The state of a device that can be used.
pub(super) const HEALTHY: &str = "Healthy";
/// The state of one that cannot.
pub(super) const UNHEALTHY: &str = "Unhealthy";

/// Where the kubelet has its sockets.
#[derive(Clone, Debug)]
pub(super) struct Sockets {
    folder: PathBuf,
}

impl Sockets {
    /// In the kubelet's folder, usually `/var/lib/kubelet`.
    pub(super) fn of(folder: &Path) -> Self {
        Self { folder: folder.into() }
    }

    /// The folder in which device plugins listen.
    pub(super) fn plugins(&self) -> PathBuf {
        self.folder.join("device-plugins")
    }

    /// Where device plugins register.
    pub(super) fn registration(&self) -> PathBuf {
        self.plugins().join("kubelet.sock")
    }

    fn pod_resources(&self) -> PathBuf {
        self.folder.join("pod-resources/kubelet.sock")
    }

    /// Registers the plugin that listens at this name in the folder of plugins.
    pub(super) async fn register(&self, endpoint: &str, resource: &str) -> Result<(), Status> {
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: endpoint.into(),
            resource_name: resource.into(),
            options: Some(OPTIONS),
        };
        let path = "/v1beta1.Registration/Register";
        call::<_, Empty>(&self.registration(), path, request).await.map(drop)
    }

    /// All pods of the node with the devices that their containers have.
    pub(super) async fn pods(&self) -> Result<Vec<PodResources>, Status> {
        let path = "/v1.PodResourcesLister/List";
        let list: PodList = call(&self.pod_resources(), path, Empty {}).await?;
        Ok(list.pod_resources)
    }
}

/// Calls a method at a socket, and waits for its answer for a bounded time.
pub(super) async fn call<M, A>(socket: &Path, path: &'static str, request: M) -> Result<A, Status>
where
    M: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    let exchange = async {
        let channel = connect(socket).await?;
        let mut grpc = tonic::client::Grpc::new(channel);
        grpc.ready().await.map_err(|e| Status::unavailable(e.to_string()))?;
        let codec = ProstCodec::<M, A>::default();
        let path = PathAndQuery::from_static(path);
        Ok(grpc.unary(tonic::Request::new(request), path, codec).await?.into_inner())
    };
    let late = |_| Status::deadline_exceeded(format!("no answer within {} s", WITHIN.as_secs()));
    tokio::time::timeout(WITHIN, exchange).await.map_err(late)?
}

async fn connect(socket: &Path) -> Result<Channel, Status> {
    let failed =
        |e: tonic::transport::Error| Status::unavailable(format!("{}: {e}", socket.display()));
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).map_err(failed)?;
    endpoint.connect().await.map_err(failed)
}

/// What the plugin asks of the kubelet: to be called before each start of a container.
pub(super) const OPTIONS: Options =
    Options { pre_start_required: true, get_preferred_allocation_available: false };

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Empty {}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct Options {
    #[prost(bool, tag = "1")]
    pub(super) pre_start_required: bool,
    #[prost(bool, tag = "2")]
    pub(super) get_preferred_allocation_available: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RegisterRequest {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(string, tag = "2")]
    endpoint: String,
    #[prost(string, tag = "3")]
    resource_name: String,
    #[prost(message, optional, tag = "4")]
    options: Option<Options>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Device {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(string, tag = "2")]
    pub(super) health: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Devices {
    #[prost(message, repeated, tag = "1")]
    pub(super) devices: Vec<Device>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PreStartRequest {
    #[prost(string, repeated, tag = "1")]
    pub(super) devices_ids: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct AllocateRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) container_requests: Vec<ContainerAllocateRequest>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerAllocateRequest {
    #[prost(string, repeated, tag = "1")]
    pub(super) devices_ids: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct AllocateResponse {
    #[prost(message, repeated, tag = "1")]
    pub(super) container_responses: Vec<ContainerAllocateResponse>,
}

/// What a container with these devices gets.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerAllocateResponse {
    #[prost(map = "string, string", tag = "1")]
    pub(super) envs: HashMap<String, String>,
    #[prost(message, repeated, tag = "2")]
    pub(super) mounts: Vec<Mount>,
    #[prost(message, repeated, tag = "5")]
    pub(super) cdi_devices: Vec<CdiDevice>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Mount {
    #[prost(string, tag = "1")]
    pub(super) container_path: String,
    #[prost(string, tag = "2")]
    pub(super) host_path: String,
    #[prost(bool, tag = "3")]
    pub(super) read_only: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct CdiDevice {
    #[prost(string, tag = "1")]
    pub(super) name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PodList {
    #[prost(message, repeated, tag = "1")]
    pod_resources: Vec<PodResources>,
}

/// A pod with the devices that its containers have.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodResources {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) namespace: String,
    #[prost(message, repeated, tag = "3")]
    pub(super) containers: Vec<ContainerResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerResources {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(message, repeated, tag = "2")]
    pub(super) devices: Vec<ContainerDevices>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerDevices {
    #[prost(string, tag = "1")]
    pub(super) resource_name: String,
    #[prost(string, repeated, tag = "2")]
    pub(super) device_ids: Vec<String>,
}
