//! The agent of a node: what the scheduler decided is put into force here, and what is measured
//! here is told to the scheduler. It has no engine: a [`Machine`] whose tenants are the containers
//! of a kubelet.
//!
//! ```text
//!               places                  pods of this node
//!   kubelet ⇄ plugin ──▶ places ┐   ┌──◀── API server ◀── applied, measured, inventory ┐
//!                               ▼   ▼                                                  │
//!   containers ◀── Machine ◀── tenants (what is assigned, what is in force) ──▶ notes ─┘
//! ```
//!
//! - A container gets *places* from the kubelet, which are tickets; its GPUs are those of the
//!   scheduler's assignment. Before a container starts, the kubelet is asked whose places they are,
//!   so that no pod gets what was decided for another.
//! - A pod is never trusted: what it can reach is one socket, where it says the token that it was
//!   started with, from its own container.
//! - An agent that starts anew reads from a file which places it gave, and finds the containers.

mod cdi;
mod health;
mod kubelet;
mod notes;
mod places;
mod plugin;
mod status;
mod tenants;
mod watch;

use crate::client::{Access, Error, client};
use crate::event::Says;
use crate::names;
use crate::objects::Pod;
use health::{Change, Health};
use kubelet::{CdiDevice, ContainerAllocateResponse, Device, Mount, Sockets};
use notes::Notes;
use places::{Given, OfPod, Places};
use plugin::{Ask, Plugin};
use roommate_agent::device::{Kind, Mechanism};
use roommate_agent::machine::{Input, Machine, Report, Setup};
use roommate_agent::paths::Paths;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tenants::{Tenants, View};
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

/// How to run an agent.
#[derive(Clone, Debug)]
pub struct Options {
    /// The API server.
    pub access: Access,
    /// The node.
    pub node: String,
    /// The type of its devices; none = GPUs if there are any, else cores.
    pub kind: Option<Kind>,
    /// Number of devices; none = all.
    pub devices: Option<u16>,
    /// Pods that can share a device.
    pub slots: u32,
    /// Mechanisms that are not to be used.
    pub without: Vec<Mechanism>,
    /// The agent's own files.
    pub state: PathBuf,
    /// A folder that containers see as [`SEEN_AT`]: the socket for tenants.
    pub run: PathBuf,
    /// The folder of the kubelet.
    pub kubelet: PathBuf,
    /// The folder of device descriptions for container runtimes.
    pub cdi: PathBuf,
    /// Where it answers over HTTP.
    pub listen: Option<SocketAddr>,
    /// The resource that it offers.
    pub resource: String,
    /// This program.
    pub program: PathBuf,
}

/// Where containers see the folder with the socket for tenants.
pub const SEEN_AT: &str = "/run/roommate";
/// The socket in it.
const SOCKET: &str = "tenant.sock";
/// How long a container's start may wait for the pod's assignment and its devices; the kubelet
/// gives up after 30 s.
const START_WITHIN: Duration = Duration::from_secs(20);
/// How often something is looked at that nobody tells the agent.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How often what is not there any more is forgotten.
const TIDY_EVERY: Duration = Duration::from_secs(60);

/// A start of a container that waits.
struct Starting {
    places: Vec<String>,
    of: OfPod,
    answer: oneshot::Sender<Result<(), String>>,
    since: Instant,
}

/// What the agent hears.
enum Heard {
    Watched(watch::News),
    /// Whose places those of a start are.
    Owner(Vec<String>, oneshot::Sender<Result<(), String>>, Result<OfPod, String>),
}

/// Takes care of a node until `ended` is ready. `told` hears what people want to know.
pub async fn run(
    options: Options,
    ended: impl Future<Output = ()>,
    told: &mut dyn FnMut(&str),
) -> Result<(), Error> {
    make_folders(&options)?;
    let (to_machine, mut inputs) = mpsc::unbounded_channel::<Input>();
    let (machine, kind) = open(&options, &to_machine)?;
    told(&format!("devices: {}", machine.enforcement().what));
    let client = client(&options.access).await?;
    let version = client.apiserver_version().await.map_err(Error::api("the API server"))?;
    told(&format!("API server: Kubernetes {}", version.git_version));
    let file = options.state.join("places.json");
    let (places, damaged) =
        Places::open(&file).map_err(Error::io(format!("read {}", file.display())))?;
    damaged.iter().for_each(|what| told(what));

    let (to_asks, mut asks) = mpsc::channel(64);
    let (to_told, mut registered) = mpsc::channel(16);
    let (to_heard, mut heard) = mpsc::channel(1024);
    let (to_status, mut status) = mpsc::channel(16);
    if let Some(at) = options.listen {
        let at = status::serve(at, to_status).await?;
        told(&format!("http://{at}: /healthz, /readyz, /metrics"));
    }
    let offered = health::places(gpus_of(&machine), options.slots, &BTreeSet::new(), &[]);
    let (devices, seen) = tokio::sync::watch::channel(offered);
    let sockets = Sockets::of(&options.kubelet);
    let resource = options.resource.clone();
    let plugin = Plugin { sockets: sockets.clone(), resource, devices: seen, asks: to_asks };
    let watched = watch::pods(client.clone(), options.node.clone(), to_heard.clone());
    let tasks = [tokio::spawn(plugin.run(to_told)), tokio::spawn(watched)];

    let mut agent = Agent {
        tenants: Tenants::new(&options.resource),
        notes: Notes::new(client, options.node.clone()),
        health: Health::default(),
        devices,
        machine,
        kind,
        places,
        sockets,
        starting: Vec::new(),
        to_heard,
        registrations: 0,
        listed: false,
        tidied: Instant::now(),
        options,
    };
    agent.machine.listen().map_err(Error::agent)?;
    agent.machine.expect(agent.places.tokens());
    agent.publish();
    let mut ended = std::pin::pin!(ended);
    let mut batch = Vec::new();
    let outcome = loop {
        let due = agent.due();
        tokio::select! {
            () = &mut ended => break Ok(()),
            n = inputs.recv_many(&mut batch, 256) => {
                if n == 0 {
                    break Err(Error::Other("the machine has ended".into()));
                }
                batch.drain(..).for_each(|input| agent.machine.handle(input));
            }
            Some(heard) = heard.recv() => agent.hear(heard, told),
            Some(ask) = asks.recv() => agent.asked(ask),
            Some(how) = registered.recv() => agent.registered(how, told),
            Some(ask) = status.recv() => agent.answer(ask),
            failed = agent.notes.written() => failed.iter().for_each(|what| told(what)),
            () = sleep(due) => {}
        }
        agent.work(told);
    };
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    // Pods run on without the agent, but none is left standing still.
    agent.machine.close();
    outcome
}

fn make_folders(options: &Options) -> Result<(), Error> {
    for (folder, mode) in [(&options.state, 0o700), (&options.run, 0o755)] {
        let made = fs::create_dir_all(folder)
            .and_then(|()| fs::set_permissions(folder, fs::Permissions::from_mode(mode)));
        made.map_err(Error::io(format!("create the folder {}", folder.display())))?;
    }
    Ok(())
}

/// Opens the devices: GPUs if there are any, unless a type is asked for.
fn open(options: &Options, to: &mpsc::UnboundedSender<Input>) -> Result<(Machine, Kind), Error> {
    let open = |kind: Kind| {
        let to = to.clone();
        let usual = Setup::of_cores(Paths::new(&options.state), options.program.clone());
        let mut setup = usual.of_guests(options.run.join(SOCKET));
        (setup.kind, setup.devices) = (kind, options.devices);
        setup.without.clone_from(&options.without);
        Machine::open(setup, Arc::new(move |input| to.send(input).is_ok())).map(|m| (m, kind))
    };
    match options.kind {
        Some(kind) => open(kind).map_err(Error::agent),
        None => open(Kind::Cuda).or_else(|_| open(Kind::Cpu)).map_err(Error::agent),
    }
}

fn gpus_of(machine: &Machine) -> u16 {
    machine.cluster().groups.first().map_or(0, |g| g.gpus)
}

struct Agent {
    options: Options,
    kind: Kind,
    machine: Machine,
    tenants: Tenants,
    places: Places,
    notes: Notes,
    health: Health,
    /// What the kubelet is offered.
    devices: tokio::sync::watch::Sender<Vec<Device>>,
    sockets: Sockets,
    starting: Vec<Starting>,
    to_heard: mpsc::Sender<Heard>,
    registrations: u64,
    /// Whether all pods of the node are known.
    listed: bool,
    tidied: Instant,
}

impl Agent {
    /// How long until there is something to do that nobody tells.
    fn due(&self) -> Duration {
        let now = Instant::now();
        let machine = self.machine.due().map(|at| at.saturating_duration_since(now));
        let waits = !self.starting.is_empty() || self.tenants.are_waiting();
        let most = if waits { LOOK_EVERY } else { health::LOOK_EVERY };
        [machine, self.notes.due(now)].into_iter().flatten().min().map_or(most, |d| d.min(most))
    }

    fn hear(&mut self, heard: Heard, told: &mut dyn FnMut(&str)) {
        match heard {
            Heard::Watched(watch::News::Pod(pod)) => self.tenants.observe(*pod),
            Heard::Watched(watch::News::PodGone(uid)) => {
                self.tenants.gone(&uid, &mut self.machine);
                self.notes.forget(&uid);
            }
            Heard::Watched(watch::News::Pods(all)) => {
                for uid in self.tenants.not_among(&all) {
                    self.tenants.gone(&uid, &mut self.machine);
                    self.notes.forget(&uid);
                }
                if !std::mem::replace(&mut self.listed, true) {
                    told(&format!("knows {} pods of this node", all.len()));
                }
            }
            Heard::Watched(watch::News::Trouble(what)) => told(&what),
            Heard::Owner(places, answer, of) => match of {
                Ok(of) => {
                    let since = Instant::now();
                    self.starting.push(Starting { places, of, answer, since });
                }
                Err(why) => drop(answer.send(Err(why))),
            },
        }
    }

    fn registered(&mut self, how: Result<(), String>, told: &mut dyn FnMut(&str)) {
        match how {
            Ok(()) => {
                self.registrations += 1;
                told(&format!("the kubelet offers {}", self.options.resource));
            }
            Err(why) => told(&format!("device plugin: {why}; trying again")),
        }
    }

    fn asked(&mut self, ask: Ask) {
        match ask {
            Ask::Allocate(places, answer) => drop(answer.send(self.allocate(places))),
            Ask::PreStart(places, answer) => {
                let (sockets, to) = (self.sockets.clone(), self.to_heard.clone());
                let resource = self.options.resource.clone();
                tokio::spawn(async move {
                    let of = owner(&sockets, &resource, &places).await;
                    let _ = to.send(Heard::Owner(places, answer, of)).await;
                });
            }
        }
    }

    /// What a container gets with its places, whatever is decided for it.
    fn allocate(&mut self, places: Vec<String>) -> Result<ContainerAllocateResponse, String> {
        let token = format!("{:016x}{:016x}", rand(), rand());
        let socket = format!("{SEEN_AT}/{SOCKET}");
        let envs = [("ROOMMATE_SOCKET".into(), socket), ("ROOMMATE_TOKEN".into(), token.clone())];
        let name = Given::name(&{
            let mut sorted = places.clone();
            sorted.sort_unstable();
            sorted
        });
        let given = self.places.give(places, token);
        given.map_err(|e| format!("could not keep what was given: {e}"))?;
        self.machine.expect(self.places.tokens());
        let mount = Mount {
            container_path: SEEN_AT.into(),
            host_path: self.options.run.display().to_string(),
            read_only: true,
        };
        let cdi_devices = match self.kind {
            Kind::Cpu => Vec::new(),
            Kind::Cuda => vec![CdiDevice { name: cdi::device(&name) }],
        };
        Ok(ContainerAllocateResponse { envs: envs.into(), mounts: vec![mount], cdi_devices })
    }

    /// Does all that can be done now.
    fn work(&mut self, told: &mut dyn FnMut(&str)) {
        self.look_at_devices(told);
        self.start_containers();
        self.tenants.reconcile(&mut self.machine, &self.places, &mut self.notes, told);
        self.machine.poll();
        for report in self.machine.take_reports() {
            if let Report::Notice { what, .. } = &report {
                told(what);
            }
            self.tenants.reported(&report, &mut self.notes);
        }
        self.tenants.note(&mut self.notes);
        self.notes.send(Instant::now());
        if self.listed && self.tidied.elapsed() >= TIDY_EVERY {
            self.tidied = Instant::now();
            let tenants = &self.tenants;
            if let Err(e) = self.places.keep(|of| tenants.has(of)) {
                told(&format!("could not keep what was given: {e}"));
            }
        }
    }

    /// Offers devices that can be used, and tells of others.
    fn look_at_devices(&mut self, told: &mut dyn FnMut(&str)) {
        let now = Instant::now();
        if !self.health.is_due(now) {
            return;
        }
        let changes = self.health.look(&self.machine.unhealthy(), now);
        for change in &changes {
            let (warns, reason, note) = match change {
                Change::Lost(number, why) => {
                    (true, "GpuUnhealthy", format!("GPU {number} cannot be used: {why}"))
                }
                Change::Back(number) => {
                    (false, "GpuRecovered", format!("GPU {number} can be used again"))
                }
            };
            told(&note);
            let says = Says { warns, reason, action: "Probing", note: &note };
            self.notes.event_of_node(says);
        }
        if !changes.is_empty() {
            self.publish();
        }
        let lost: BTreeSet<u16> = self.health.lost().into_keys().collect();
        if changes.is_empty() && lost.is_empty() {
            return;
        }
        let held = self.tenants.held(&self.places);
        let offered = health::places(gpus_of(&self.machine), self.options.slots, &lost, &held);
        self.devices.send_if_modified(|now| {
            let changed = *now != offered;
            *now = offered;
            changed
        });
    }

    /// Lets containers start whose pods have an assignment, and whose devices admit them.
    fn start_containers(&mut self) {
        for starting in std::mem::take(&mut self.starting) {
            let Starting { of, places, .. } = &starting;
            let ready = match self.tenants.assigned(of) {
                Ok(None) => Ok(None),
                Ok(Some((job, start))) => match self.kind {
                    Kind::Cpu => Ok(Some(BTreeMap::new())),
                    Kind::Cuda => Ok(self.machine.prepare(job, &start)),
                },
                Err(why) => Err(why),
            };
            let done = match ready {
                Ok(None) if starting.since.elapsed() < START_WITHIN => {
                    self.starting.push(starting);
                    continue;
                }
                Ok(None) => Err(format!(
                    "{}/{} was not assigned GPUs by Roommate: pods that ask for {} need \
                     spec.schedulerName: {}",
                    of.namespace,
                    of.pod,
                    self.options.resource,
                    names::SCHEDULER
                )),
                Ok(Some(env)) => self.begin(places.clone(), of, env),
                Err(why) => Err(why),
            };
            let _ = starting.answer.send(done);
        }
    }

    fn begin(
        &mut self,
        places: Vec<String>,
        of: &OfPod,
        env: BTreeMap<String, String>,
    ) -> Result<(), String> {
        if self.kind == Kind::Cuda {
            let mut sorted = places.clone();
            sorted.sort_unstable();
            let written = cdi::write(&self.options.cdi, &Given::name(&sorted), &env);
            written.map_err(|e| format!("could not write {}: {e}", self.options.cdi.display()))?;
        }
        let kept = self.places.start(places, of, env);
        let kept = kept.map_err(|e| format!("could not keep what was given: {e}"))?;
        if !kept {
            return Err("these places were given by an agent that is gone: delete the pod".into());
        }
        self.machine.expect(self.places.tokens());
        Ok(())
    }

    /// Tells the scheduler of the devices.
    fn publish(&mut self) {
        let cluster = self.machine.cluster();
        let model = cluster.gpu_models.first();
        let mut inventory = json!({
            "gpus": gpus_of(&self.machine),
            "model": model.map_or("gpu", |m| m.name.as_str()),
            "mem_mib": model.map_or(0, |m| m.mem_mib),
            "slots": self.options.slots,
            "tier": self.machine.enforcement().tier,
        });
        let lost = self.health.lost();
        if !lost.is_empty() {
            inventory["unhealthy"] = json!(lost);
        }
        self.notes.annotate_node(names::INVENTORY, inventory.to_string());
    }

    fn answer(&self, ask: status::Ask) {
        match ask {
            status::Ask::Ready(to) => drop(to.send(match (self.registrations, self.listed) {
                (1.., true) => Ok("ok".into()),
                (0, _) => Err("not registered at the kubelet".into()),
                _ => Err("the pods of this node are being listed".into()),
            })),
            status::Ask::Metrics(to) => {
                let view = View {
                    node: &self.options.node,
                    gpus: gpus_of(&self.machine),
                    tier: self.machine.enforcement().tier.to_string(),
                    registrations: self.registrations,
                    unhealthy: self.health.lost().len(),
                };
                drop(to.send(self.tenants.metrics(&view)));
            }
        }
    }
}

/// The container that has these places.
async fn owner(sockets: &Sockets, resource: &str, places: &[String]) -> Result<OfPod, String> {
    let pods = sockets.pods().await.map_err(|e| format!("list of pods: {}", e.message()))?;
    let mut wanted = places.to_vec();
    wanted.sort_unstable();
    for pod in pods {
        for container in pod.containers {
            let own = container.devices.iter().filter(|d| d.resource_name == resource);
            let mut own: Vec<String> = own.flat_map(|d| d.device_ids.clone()).collect();
            own.sort_unstable();
            if own == wanted {
                let container = container.name;
                return Ok(OfPod { namespace: pod.namespace, pod: pod.name, container });
            }
        }
    }
    Err(format!("the kubelet knows no container with {}", places.join(", ")))
}

fn rand() -> u64 {
    roommate_agent::process::random()
}

/// The container that asks for the resource.
fn container_of(pod: &Pod, resource: &str) -> Option<String> {
    let asks = |c: &&crate::objects::Container| {
        let limits = c.resources.as_ref().and_then(|r| r.limits.as_ref());
        limits.is_some_and(|l| l.contains_key(resource))
    };
    pod.spec.containers.iter().find(asks).map(|c| c.name.clone())
}
