//! The device plugin: a gRPC server at a socket in the kubelet's folder of plugins. It offers
//! places: a pod needs one for each GPU that it uses, and which GPUs those are was decided before,
//! so a place is only a ticket.

use super::kubelet::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, Devices, Empty, OPTIONS,
    Options, PreStartRequest, Sockets, call,
};
use futures::Stream;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::convert::Infallible;
use std::future::Future;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::body::Body;
use tonic::server::{Grpc, ServerStreamingService, UnaryService};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

/// What the kubelet asks.
pub(super) enum Ask {
    /// A container gets these places.
    Allocate(Vec<String>, oneshot::Sender<Result<ContainerAllocateResponse, String>>),
    /// A container with these places is about to be started.
    PreStart(Vec<String>, oneshot::Sender<Result<(), String>>),
}

/// The socket's name.
const ENDPOINT: &str = "roommate.sock";
/// How often it is looked whether the kubelet was started again.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Pause after a registration that failed.
const AGAIN: Duration = Duration::from_secs(1);

/// A device plugin.
#[derive(Clone)]
pub(super) struct Plugin {
    pub(super) sockets: Sockets,
    pub(super) resource: String,
    pub(super) devices: watch::Receiver<Vec<Device>>,
    pub(super) asks: mpsc::Sender<Ask>,
}

impl Plugin {
    /// Serves, and registers anew whenever the kubelet was started again; it clears its folder of
    /// plugins then. `told` hears of each registration and of each failure.
    pub(super) async fn run(self, told: mpsc::Sender<Result<(), String>>) {
        loop {
            match self.serve_once(&told).await {
                Ok(()) => {}
                Err(why) => {
                    if told.send(Err(why)).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(AGAIN).await;
                }
            }
        }
    }

    /// Serves as long as the kubelet stays the same.
    async fn serve_once(&self, told: &mpsc::Sender<Result<(), String>>) -> Result<(), String> {
        let registration = self.sockets.registration();
        let kubelet = identity(&registration)
            .ok_or_else(|| format!("{}: no kubelet listens there", registration.display()))?;
        let socket = self.sockets.plugins().join(ENDPOINT);
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket)
            .map_err(|e| format!("could not listen at {}: {e}", socket.display()))?;
        let own = identity(&socket);
        let serving = AbortOnDrop(tokio::spawn(serve(listener, self.clone())));
        // The kubelet calls back before it answers, so the plugin has to answer already.
        let options = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
        let own_answer = call::<_, Options>(&socket, options, Empty {}).await;
        own_answer.map_err(|e| format!("the plugin does not answer itself: {}", e.message()))?;
        let registered = self.sockets.register(ENDPOINT, &self.resource).await;
        registered.map_err(|e| format!("registration at the kubelet: {}", e.message()))?;
        let _ = told.send(Ok(())).await;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            if identity(&registration) != Some(kubelet) || identity(&socket) != own {
                drop(serving);
                return Ok(());
            }
        }
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What tells a socket from a later one at the same path.
fn identity(path: &Path) -> Option<(u64, u64, i64)> {
    let found = std::fs::metadata(path).ok()?;
    Some((found.dev(), found.ino(), found.ctime_nsec()))
}

async fn serve(listener: UnixListener, plugin: Plugin) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let plugin = plugin.clone();
        tokio::spawn(async move {
            let answer = service_fn(move |request| answer(request, plugin.clone()));
            let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            // Whoever hangs up has lost interest.
            drop(http.serve_connection(TokioIo::new(stream), answer).await);
        });
    }
}

async fn answer(request: Request<Incoming>, plugin: Plugin) -> Result<Response<Body>, Infallible> {
    let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_string();
    Ok(match method.as_str() {
        "GetDevicePluginOptions" => unary(request, |_: Empty| async { Ok(OPTIONS) }).await,
        "Allocate" => unary(request, |r| allocate(r, plugin)).await,
        "PreStartContainer" => unary(request, |r| pre_start(r, plugin)).await,
        "ListAndWatch" => {
            let mut grpc = Grpc::new(ProstCodec::<Devices, Empty>::default());
            grpc.server_streaming(Lists(plugin.devices), request).await
        }
        _ => Status::new(Code::Unimplemented, method).into_http(),
    })
}

async fn allocate(request: AllocateRequest, plugin: Plugin) -> Result<AllocateResponse, Status> {
    let mut container_responses = Vec::new();
    for container in request.container_requests {
        let (answer, answered) = oneshot::channel();
        ask(&plugin.asks, Ask::Allocate(container.devices_ids, answer)).await?;
        container_responses.push(heard(answered).await?);
    }
    Ok(AllocateResponse { container_responses })
}

async fn pre_start(request: PreStartRequest, plugin: Plugin) -> Result<Empty, Status> {
    let (answer, answered) = oneshot::channel();
    ask(&plugin.asks, Ask::PreStart(request.devices_ids, answer)).await?;
    heard(answered).await.map(|()| Empty {})
}

async fn ask(asks: &mpsc::Sender<Ask>, what: Ask) -> Result<(), Status> {
    asks.send(what).await.map_err(|_| Status::unavailable("the agent is ending"))
}

async fn heard<T>(answered: oneshot::Receiver<Result<T, String>>) -> Result<T, Status> {
    let answer = answered.await.map_err(|_| Status::unavailable("the agent is ending"))?;
    answer.map_err(Status::failed_precondition)
}

/// Answers a call with one message.
async fn unary<M, A, F>(
    request: Request<Incoming>,
    answer: impl FnOnce(M) -> F + Send,
) -> Response<Body>
where
    M: prost::Message + Default + 'static,
    A: prost::Message + 'static,
    F: Future<Output = Result<A, Status>> + Send + 'static,
{
    let mut grpc = Grpc::new(ProstCodec::<A, M>::default());
    grpc.unary(Once(Some(answer)), request).await
}

/// A method that is called once.
struct Once<F>(Option<F>);

type Answer<A> = Pin<Box<dyn Future<Output = Result<tonic::Response<A>, Status>> + Send>>;

impl<M, A, F, R> UnaryService<M> for Once<F>
where
    A: 'static,
    F: FnOnce(M) -> R,
    R: Future<Output = Result<A, Status>> + Send + 'static,
{
    type Response = A;
    type Future = Answer<A>;

    fn call(&mut self, request: tonic::Request<M>) -> Self::Future {
        let Some(answer) = self.0.take() else {
            return Box::pin(async { Err(Status::internal("called twice")) });
        };
        let answer = answer(request.into_inner());
        Box::pin(async move { answer.await.map(tonic::Response::new) })
    }
}

/// The list of devices, whenever it changes.
struct Lists(watch::Receiver<Vec<Device>>);

type ListStream = Pin<Box<dyn Stream<Item = Result<Devices, Status>> + Send>>;

impl ServerStreamingService<Empty> for Lists {
    type Response = Devices;
    type ResponseStream = ListStream;
    type Future = Answer<ListStream>;

    fn call(&mut self, _: tonic::Request<Empty>) -> Self::Future {
        let mut devices = self.0.clone();
        devices.mark_changed();
        let lists = futures::stream::unfold(devices, |mut devices| async move {
            devices.changed().await.ok()?;
            let list = Devices { devices: devices.borrow_and_update().clone() };
            Some((Ok(list), devices))
        });
        Box::pin(async move { Ok(tonic::Response::new(Box::pin(lists) as ListStream)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::kubelet::{ContainerAllocateRequest, HEALTHY};

    fn plugin(folder: &Path) -> (Plugin, watch::Sender<Vec<Device>>, mpsc::Receiver<Ask>) {
        let one = Device { id: "place-0".into(), health: HEALTHY.into() };
        let (devices, seen) = watch::channel(vec![one]);
        let (asks, asked) = mpsc::channel(4);
        let sockets = Sockets::of(folder);
        let resource = "roommate.dev/gpu".into();
        (Plugin { sockets, resource, devices: seen, asks }, devices, asked)
    }

    #[tokio::test]
    async fn a_kubelet_is_answered_through_its_own_protocol() {
        let folder = tempfile::tempdir().unwrap();
        let (plugin, _devices, mut asked) = plugin(folder.path());
        let socket = folder.path().join("p.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let serving = AbortOnDrop(tokio::spawn(serve(listener, plugin)));
        let path = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
        assert_eq!(call::<_, Options>(&socket, path, Empty {}).await.unwrap(), OPTIONS);
        tokio::spawn(async move {
            while let Some(ask) = asked.recv().await {
                match ask {
                    Ask::Allocate(ids, to) => {
                        let envs = [("IDS".to_string(), ids.join(","))].into();
                        to.send(Ok(ContainerAllocateResponse { envs, ..Default::default() }))
                            .unwrap();
                    }
                    Ask::PreStart(_, to) => to.send(Err("not ours".into())).unwrap(),
                }
            }
        });
        let places = vec!["place-3".to_string(), "place-5".to_string()];
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest { devices_ids: places.clone() }],
        };
        let path = "/v1beta1.DevicePlugin/Allocate";
        let given: AllocateResponse = call(&socket, path, request).await.unwrap();
        assert_eq!(given.container_responses[0].envs["IDS"], "place-3,place-5");
        let path = "/v1beta1.DevicePlugin/PreStartContainer";
        let refused =
            call::<_, Empty>(&socket, path, PreStartRequest { devices_ids: places }).await;
        assert_eq!(refused.unwrap_err().message(), "not ours");
        let unknown = call::<_, Empty>(&socket, "/v1beta1.DevicePlugin/Other", Empty {}).await;
        assert_eq!(unknown.unwrap_err().code(), Code::Unimplemented);
        drop(serving);
    }
}
