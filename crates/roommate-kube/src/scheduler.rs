//! The scheduler: the [world](crate::world) between the watches of an API server and its writes.
//!
//! One thread: what was observed meanwhile is decided together, writes are sent side by side. A
//! scheduler that starts knows nothing but what pods and nodes say, and decides nothing before it
//! has seen all of them.

mod board;
mod lease;
mod metrics;
mod resources;
mod status;
pub(crate) mod watch;
mod write;

pub use lease::Election;

use crate::board::written::{self, Written};
use crate::client::{Access, Error, client};
use crate::event::Says;
use crate::objects::Pod;
use crate::world::{Answer, PodRef, Settings, World, Write};
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use kube::{Client, ResourceExt as _};
use lease::Held;
use metrics::Metrics;
use resources::{Queues, StatusWrite};
use roommate_core::time::Time;
use status::Ask;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, Receiver};
use tokio::time::sleep;
use watch::News;
use write::Writer;

/// How to run a scheduler.
#[derive(Clone, Debug)]
pub struct Options {
    /// The API server.
    pub access: Access,
    /// How it schedules.
    pub settings: Settings,
    /// Where it answers over HTTP.
    pub listen: Option<SocketAddr>,
    /// Where it serves the dashboard, an address of this machine.
    pub dashboard: Option<SocketAddr>,
    /// How it elects a leader; none = it is the only scheduler.
    pub election: Option<Election>,
    /// Most writes that are under way at a time.
    pub in_flight: usize,
    /// This process, in events.
    pub instance: String,
}

/// Most explanations and events that wait to be written; further ones are dropped.
const MOST_SIDE: usize = 20_000;
/// Of the writes that are under way, how many may be explanations and events.
const SIDE_IN_FLIGHT: usize = 4;
/// Most news that are looked at before it is decided.
const AT_ONCE: usize = 4096;
/// Most pods outside of the engine of which the dashboard is told.
const MOST_OUTSIDE: usize = 1000;
/// The least pause between two decisions: what arrives meanwhile is decided together.
const GATHER: Duration = Duration::from_millis(2);

/// Told once.
const NO_RESOURCES: &str = "queues, profiles, jobs and services of roommate.dev are not installed; \
    going on without them. hint: roommate kube crds | kubectl apply --server-side -f -";

const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Schedules until `ended` is ready or the lease is lost. `told` hears what people want to know.
pub async fn run(
    options: Options,
    ended: impl Future<Output = ()>,
    told: &mut dyn FnMut(&str),
) -> Result<(), Error> {
    // A policy that does not exist is told before anybody waits for a cluster.
    World::new(options.settings.clone())?;
    let client = client(&options.access).await?;
    let version = client.apiserver_version().await.map_err(Error::api("the API server"))?;
    told(&format!("API server: Kubernetes {}", version.git_version));
    let (to_asks, mut asks) = mpsc::channel(16);
    if let Some(at) = options.listen {
        let at = status::serve(at, to_asks.clone()).await?;
        told(&format!("http://{at}: /healthz, /readyz, /metrics, /debug"));
    }
    let mut ended = std::pin::pin!(ended);
    if let Some(at) = options.dashboard {
        let at = board::serve(at, client.clone(), to_asks.clone())?;
        told(&format!("dashboard: {at}"));
    }
    let held = match &options.election {
        None => None,
        Some(election) => {
            let mut acquire = std::pin::pin!(election.acquire(&client, told));
            let held = loop {
                tokio::select! {
                    held = &mut acquire => break held,
                    Some(ask) = asks.recv() => answer_idle(ask),
                    () = &mut ended => return Ok(()),
                }
            };
            let named = format!("lease {}/{}", election.namespace, election.name);
            Some(held.map_err(|e| Error::Other(format!("{named}: {e}")))?)
        }
    };
    let term = held.as_ref().map_or(1, |h| h.term);
    if held.is_some() {
        told(&format!("leads, term {term}"));
    }
    let settings = Settings { term, ..options.settings.clone() };
    let writer = Writer {
        client: client.clone(),
        scheduler: options.settings.scheduler.clone(),
        instance: options.instance.clone(),
    };
    let leader = Leader {
        world: World::new(settings)?,
        writer,
        in_flight: options.in_flight.max(SIDE_IN_FLIGHT + 1),
        began: Instant::now(),
        synced: Synced::default(),
        queues: Queues::default(),
        misses_resources: false,
        writes: VecDeque::new(),
        side: VecDeque::new(),
        under_way: FuturesUnordered::new(),
        side_under_way: 0,
        first_seen: HashMap::new(),
        metrics: Metrics::new(&options.settings.scheduler),
        troubles: Troubles::default(),
        term,
    };
    leader.lead(client, held, asks, ended, told).await
}

fn answer_idle(ask: Ask) {
    match ask {
        Ask::Ready(to) => drop(to.send(Ok("ok: another scheduler leads".into()))),
        Ask::Metrics(to) => drop(to.send(Metrics::new("").page(None, 0))),
        Ask::Snapshot(to) => drop(to.send(Vec::new())),
        Ask::Journal(_, to) => drop(to.send(Err("another scheduler leads".into()))),
    }
}

/// A write that was answered.
struct Answered {
    write: Option<Write>,
    answer: Answer,
    failed: Option<String>,
    /// When it was begun to decide it.
    decided: Instant,
    /// From when it was sent.
    took: Duration,
}

/// What is written besides: nobody waits for it.
enum Side {
    Explain(Write),
    Scheduled(PodRef, String),
    Status(StatusWrite),
}

/// What was listed as a whole; without it a decision could be wrong.
#[expect(clippy::struct_excessive_bools, reason = "each is about another kind of objects")]
#[derive(Clone, Copy, Default)]
struct Synced {
    pods: bool,
    nodes: bool,
    queues: bool,
    profiles: bool,
}

impl Synced {
    fn all(self) -> bool {
        self.pods && self.nodes && self.queues && self.profiles
    }
}

struct Leader {
    world: World,
    writer: Writer,
    in_flight: usize,
    began: Instant,
    synced: Synced,
    queues: Queues,
    /// Whether it was told that the custom resources are not installed.
    misses_resources: bool,
    /// Writes to send, and when it was begun to decide them.
    writes: VecDeque<(Write, Instant)>,
    side: VecDeque<Side>,
    under_way: FuturesUnordered<BoxFuture<'static, Answered>>,
    side_under_way: usize,
    /// Since when a pod is known that is not bound.
    first_seen: HashMap<String, Instant>,
    metrics: Metrics,
    troubles: Troubles,
    term: u64,
}

/// Failures are told now and then, not each.
#[derive(Default)]
struct Troubles {
    last: Option<Instant>,
    silent: u64,
}

impl Troubles {
    fn tell(&mut self, what: &str, told: &mut dyn FnMut(&str)) {
        if self.last.is_some_and(|at| at.elapsed() < Duration::from_secs(1)) {
            self.silent += 1;
            return;
        }
        let more = std::mem::take(&mut self.silent);
        self.last = Some(Instant::now());
        match more {
            0 => told(what),
            n => told(&format!("{what} (and {n} more)")),
        }
    }
}

impl Leader {
    async fn lead(
        mut self,
        client: Client,
        mut held: Option<Held>,
        mut asks: Receiver<Ask>,
        mut ended: std::pin::Pin<&mut impl Future<Output = ()>>,
        told: &mut dyn FnMut(&str),
    ) -> Result<(), Error> {
        let (to_news, mut news) = mpsc::channel(AT_ONCE);
        let watches = [
            tokio::spawn(watch::pods(client.clone(), to_news.clone())),
            tokio::spawn(watch::nodes(client.clone(), to_news.clone())),
            tokio::spawn(watch::groups(client.clone(), to_news.clone())),
            tokio::spawn(resources::run(client.clone(), self.writer.scheduler.clone(), to_news)),
        ];
        let (to_lease, mut lease) = mpsc::channel(1);
        // Without an election nobody else writes.
        let mut valid = held.as_ref().map_or(self.began + FOREVER, Held::valid_until);
        let mut renewing =
            held.take().map(|held| tokio::spawn(renew(client.clone(), held, to_lease)));
        let mut batch = Vec::new();
        let mut decided = Instant::now();
        let mut pending = false;
        let outcome = loop {
            let due = self.next_decision(pending, decided);
            tokio::select! {
                biased;
                () = &mut ended => break Ok(()),
                renewed = lease.recv(), if renewing.is_some() => match renewed {
                    Some(Ok(until)) => valid = until,
                    Some(Err(why)) => break Err(Error::Lost(format!("lost the lease: {why}"))),
                    None => break Err(Error::Lost("lost the lease".into())),
                },
                n = news.recv_many(&mut batch, AT_ONCE) => {
                    if n == 0 {
                        break Err(Error::Other("the watches have ended".into()));
                    }
                    for one in batch.drain(..) {
                        self.hear(one, told);
                    }
                    pending = true;
                }
                Some(answered) = self.under_way.next(), if !self.under_way.is_empty() => {
                    self.answered(answered, told);
                    pending = true;
                }
                Some(ask) = asks.recv() => self.answer(ask),
                () = sleep(due) => {}
            }
            if Instant::now() >= valid {
                break Err(Error::Lost("could not renew the lease in time".into()));
            }
            if self.next_decision(pending, decided).is_zero() && self.synced.all() {
                self.decide();
                decided = Instant::now();
                pending = false;
            }
            for write in self.queues.stale(&self.world) {
                self.later(Side::Status(write));
            }
            self.send(valid);
        };
        watches.iter().for_each(tokio::task::JoinHandle::abort);
        if let Some(task) = renewing.take() {
            lease.close();
            if outcome.is_ok()
                && let Ok(Some(held)) = task.await
            {
                held.release(&client).await;
            }
        }
        outcome
    }

    fn now(&self) -> Time {
        Time(u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX / 4))
    }

    /// How long until it has to be decided again.
    fn next_decision(&self, pending: bool, decided: Instant) -> Duration {
        if pending {
            return GATHER.saturating_sub(decided.elapsed());
        }
        let most = Duration::from_secs(1);
        let due = self.world.due().filter(|_| self.synced.all());
        due.map_or(most, |at| Duration::from_micros(at.0.saturating_sub(self.now().0)).min(most))
    }

    fn hear(&mut self, news: News, told: &mut dyn FnMut(&str)) {
        match news {
            News::Pod(pod) => {
                self.note_waiting(&pod);
                self.world.pod(*pod);
            }
            News::PodGone(uid) => {
                self.first_seen.remove(&uid);
                self.world.pod_gone(&uid);
            }
            News::Pods(all) => {
                self.metrics.relists += u64::from(self.synced.pods);
                self.first_seen.retain(|uid, _| all.contains(uid));
                self.world.pods_listed(&all);
                self.synced.pods = true;
                self.tell_synced(told);
            }
            News::Node(node) => self.world.node(*node),
            News::NodeGone(name) => self.world.node_gone(&name),
            News::Nodes(all) => {
                self.metrics.relists += u64::from(self.synced.nodes);
                self.world.nodes_listed(&all);
                self.synced.nodes = true;
                self.tell_synced(told);
            }
            News::Group { namespace, name, size } => self.world.group(&namespace, &name, size),
            News::Queue(queue) => {
                self.world.queue(&queue.name_any(), queue.spec.grant());
                self.queues.set(*queue);
            }
            News::QueueGone(name) => {
                self.world.queue_gone(&name);
                self.queues.remove(&name);
            }
            News::Queues(all) => {
                self.world.queues_listed(&all);
                self.queues.retain(|name| all.contains(name));
                self.synced.queues = true;
            }
            News::Profile(profile) => {
                self.world.profile(&profile.name_any(), profile.spec.expected().ok());
                if let Some(write) = resources::status_of(&profile) {
                    self.later(Side::Status(write));
                }
            }
            News::ProfileGone(name) => self.world.profile(&name, None),
            News::Profiles(all) => {
                self.world.profiles_listed(&all);
                self.synced.profiles = true;
            }
            News::NoResources => {
                (self.synced.queues, self.synced.profiles) = (true, true);
                if !std::mem::replace(&mut self.misses_resources, true) {
                    told(NO_RESOURCES);
                }
            }
            News::Trouble(what) => {
                self.metrics.failures += 1;
                self.troubles.tell(&what, told);
            }
        }
    }

    /// Remembers since when a pod waits for this scheduler and for nothing else.
    fn note_waiting(&mut self, pod: &Pod) {
        let spec = &pod.spec;
        let ours = spec.scheduler_name.as_deref() == Some(self.writer.scheduler.as_str());
        let is_gated = spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty());
        if ours && !is_gated && spec.node_name.is_none() {
            self.first_seen.entry(pod.uid().into()).or_insert_with(Instant::now);
        }
    }

    fn tell_synced(&self, told: &mut dyn FnMut(&str)) {
        if self.synced.pods && self.synced.nodes {
            let (pods, nodes) = self.world.known();
            told(&format!("knows {nodes} nodes and {pods} pods"));
        }
    }

    fn decide(&mut self) {
        let began = Instant::now();
        for write in self.world.step(self.now()) {
            match write {
                Write::Explain { .. } => {
                    self.metrics.unschedulable.add(began.elapsed());
                    self.later(Side::Explain(write));
                }
                write => self.writes.push_back((write, began)),
            }
        }
        self.metrics.decide.add(began.elapsed());
    }

    fn later(&mut self, side: Side) {
        if self.side.len() >= MOST_SIDE {
            drop(self.side.pop_back());
            self.metrics.dropped += 1;
        }
        // Whoever waits wants to know why; that others were placed can be said later.
        match side {
            Side::Explain(_) => self.side.push_front(side),
            _ => self.side.push_back(side),
        }
    }

    /// Sends what may be sent: nothing once the lease may be another's.
    fn send(&mut self, valid: Instant) {
        if Instant::now() >= valid {
            return;
        }
        while self.under_way.len() - self.side_under_way < self.in_flight
            && let Some((write, decided)) = self.writes.pop_front()
        {
            let writer = self.writer.clone();
            let sent = Instant::now();
            self.under_way.push(Box::pin(async move {
                let (answer, failed) = writer.carry_out(&write).await;
                Answered { write: Some(write), answer, failed, decided, took: sent.elapsed() }
            }));
        }
        while self.side_under_way < SIDE_IN_FLIGHT
            && let Some(side) = self.side.pop_front()
        {
            let writer = self.writer.clone();
            let sent = Instant::now();
            self.side_under_way += 1;
            self.under_way.push(Box::pin(async move {
                let (answer, failed) = match side {
                    Side::Explain(write) => writer.carry_out(&write).await,
                    Side::Status(write) => {
                        let status = writer.status(&write).await;
                        (Answer::Done, status.err().map(|e| format!("{}: {e}", write.path)))
                    }
                    Side::Scheduled(pod, note) => {
                        let event = writer.event(
                            &pod,
                            Says {
                                warns: false,
                                reason: "Scheduled",
                                action: "Binding",
                                note: &note,
                            },
                        );
                        (Answer::Done, event.await.err().map(|e| e.to_string()))
                    }
                };
                Answered { write: None, answer, failed, decided: sent, took: sent.elapsed() }
            }));
        }
    }

    fn answered(&mut self, answered: Answered, told: &mut dyn FnMut(&str)) {
        let Answered { write, answer, failed, decided, took } = answered;
        if let Some(failed) = failed {
            self.metrics.failures += 1;
            let what = write.as_ref().map_or_else(|| "event or status".into(), describe);
            self.troubles.tell(&format!("{what}: {failed}"), told);
        }
        let Some(write) = write else {
            self.side_under_way -= 1;
            return;
        };
        if let (Write::Bind { .. }, Answer::Refused | Answer::Later | Answer::Lost) =
            (&write, answer)
        {
            self.metrics.failed.add(decided.elapsed());
        }
        if let (Write::Bind { pod, node, .. }, Answer::Done) = (&write, answer) {
            self.metrics.scheduled.add(decided.elapsed());
            self.metrics.bind.add(took);
            if let Some(first) = self.first_seen.remove(&pod.uid) {
                self.metrics.wait.add(first.elapsed());
            }
            let note = format!("Successfully assigned {}/{} to {node}", pod.namespace, pod.name);
            self.later(Side::Scheduled(pod.clone(), note));
        }
        self.world.answer(&write, answer);
    }

    fn answer(&self, ask: Ask) {
        match ask {
            Ask::Ready(to) => drop(to.send(if self.synced.all() {
                Ok("ok: leads".into())
            } else {
                Err("pods, nodes and queues are being listed".into())
            })),
            Ask::Metrics(to) => {
                drop(to.send(self.metrics.page(Some(&self.world), self.term)));
            }
            Ask::Snapshot(to) => drop(to.send(self.world.snapshot(self.now()))),
            Ask::Journal(from, to) => {
                let part = self.world.counts().parts;
                let piece = |read: &mut dyn FnMut(&[u8])| self.world.read_journal(read);
                let mut written = Written::of(piece, (self.term, part), from, self.now());
                if let (Ok(written), written::NOW) = (&mut written, from) {
                    written.outside.extend(self.world.outside().take(MOST_OUTSIDE));
                }
                drop(to.send(written));
            }
        }
    }
}

fn describe(write: &Write) -> String {
    let PodRef { namespace, name, .. } = write.pod();
    match write {
        Write::Bind { node, .. } => format!("bind {namespace}/{name} to {node}"),
        Write::Assign { .. } => format!("assignment of {namespace}/{name}"),
        Write::Evict { .. } => format!("evict {namespace}/{name}"),
        Write::Explain { .. } => format!("explain {namespace}/{name}"),
    }
}

/// Renews the lease until nobody wants to hear of it; gives it back then.
async fn renew(
    client: Client,
    mut held: Held,
    to: mpsc::Sender<Result<Instant, String>>,
) -> Option<Held> {
    loop {
        tokio::select! {
            () = to.closed() => return Some(held),
            () = sleep(held.next()) => {}
        }
        let renewed = held.renew(&client).await;
        let told = match renewed {
            Ok(()) if Instant::now() < held.valid_until() => Ok(held.valid_until()),
            Ok(()) => Err("could not renew it in time".into()),
            Err(why) => Err(why),
        };
        let lost = told.is_err();
        if to.send(told).await.is_err() {
            return Some(held);
        }
        if lost {
            return None;
        }
    }
}
