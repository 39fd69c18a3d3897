//! A seeded API server that lies in every way that a real one may, against the world: random
//! operations, lost and repeated answers, lost watches, schedulers that are killed. After every
//! operation no GPU may be given away twice, as the objects of the API server say; at the end
//! nothing may be leaked, and a scheduler that starts anew has to come to the same ledger.

mod checks;

use crate::assignment::Assignment;
use crate::names;
use crate::objects::{Node, Pod, PodStatus, Taint};
use crate::request::Request;
use crate::world::{Answer, Counts, Expected, Grant, Settings, Shape, World, Write};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time as Timestamp};
use k8s_openapi::jiff;
use roommate_core::math::rng::Rng;
use roommate_core::profile::Profile;
use roommate_core::time::{Span, Time};
use serde::Serialize;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What to try.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of operations.
    pub operations: u64,
    /// The seed of all of them.
    pub seed: u64,
    /// The policy.
    pub policy: String,
}

/// What became of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// Operations done.
    pub operations: u64,
    /// GPUs that were given away for more than there is, summed over all looks.
    pub over_allocations: u64,
    /// Pods that hold something in the ledger and not on a node, or the other way round, at the
    /// end; and pods that are stuck.
    pub leaks: u64,
    /// Pods that wait at the end although a whole GPU is idle for them. A policy may have a reason;
    /// for those that never leave a GPU idle it counts as a leak.
    pub stuck: u64,
    /// Pods whose constraints or CPU do not allow their node, or whose GPUs are ill.
    pub misplaced: u64,
    /// Pods that were bound beyond the quota of a queue that may not borrow.
    pub over_quota: u64,
    /// Whether a scheduler that starts anew comes to the same ledger.
    pub equal_to_rebuild: bool,
    /// Pods that were made.
    pub pods: u64,
    /// Bindings.
    pub bound: u64,
    /// Evictions.
    pub evicted: u64,
    /// Changed assignments.
    pub changed: u64,
    /// Schedulers that were killed.
    pub restarts: u64,
    /// Watches that were lost.
    pub relists: u64,
    /// Parts of the journal, all of which decide the same again.
    pub parts: u64,
    /// What was wrong first, if anything.
    pub first: Option<String>,
}

/// Most pods of a GPU.
const SLOTS: u32 = 4;
/// Pods beyond which none are made.
const CROWD: usize = 60;
/// Policies that leave no GPU idle while a pod waits that fits on it.
const WORK_CONSERVING: [&str; 4] = ["fifo-backfill", "srtf", "tiresias", "roommate"];
/// Nodes.
const NODES: u64 = 6;
/// Queues.
const QUEUES: u64 = 3;

/// What watchers are told.
enum News {
    Pod(Box<Pod>),
    PodGone(String),
    Node(Box<Node>),
    NodeGone(String),
    Queue(String, Option<Grant>),
    Profile(String, Option<Box<Expected>>),
}

/// A pod of the fake, with what the fake itself needs of it.
struct Held {
    pod: Pod,
    /// Steps of time until it is gone after it was deleted.
    grace: u32,
}

struct Api {
    pods: BTreeMap<String, Held>,
    nodes: BTreeMap<String, Node>,
    queues: BTreeMap<String, Grant>,
    profiles: BTreeMap<String, Expected>,
    news: VecDeque<News>,
    made: u64,
    /// Pods that owners still want, by owner: namespace and spec of a pod like the last one.
    wanted: VecDeque<(String, Pod)>,
    /// Owners that were deleted.
    deleted: BTreeSet<String>,
}

/// Tries.
pub fn run(plan: &Plan, tick: &mut dyn FnMut(u64)) -> Result<Outcome, String> {
    let mut settings = Settings::of(&plan.policy);
    settings.costs.max_tenants = SLOTS as u8;
    settings.most_journal = 1 << 20;
    let world = World::new(settings.clone()).map_err(|e| e.to_string())?;
    let api = Api {
        pods: BTreeMap::new(),
        nodes: BTreeMap::new(),
        queues: BTreeMap::new(),
        profiles: BTreeMap::new(),
        news: VecDeque::new(),
        made: 0,
        wanted: VecDeque::new(),
        deleted: BTreeSet::new(),
    };
    let rng = Rng::new(plan.seed);
    let mut fuzz = Fuzz {
        api,
        world,
        settings,
        rng,
        now: Time::ZERO,
        under_way: VecDeque::new(),
        told: BTreeMap::new(),
        out: Outcome::default(),
        counts: Counts::default(),
        faults: true,
        calm: false,
        keeps_quotas: false,
    };
    for i in 0..plan.operations {
        fuzz.operation();
        fuzz.out.operations += 1;
        if i % 4096 == 0 {
            tick(i);
        }
        if fuzz.out.first.is_some() {
            break;
        }
    }
    fuzz.settle();
    fuzz.finish();
    Ok(fuzz.out)
}

fn owner_of(pod: &Pod) -> Option<String> {
    Some(pod.metadata.owner_references.as_ref()?.first()?.uid.clone())
}

/// Whether no GPU of an assignment is ill.
fn is_well(node: &Node, assignment: &str) -> bool {
    let shape = Shape::of(node, names::RESOURCE);
    let decided = serde_json::from_str::<Assignment>(assignment);
    let mut all = decided.iter().flat_map(|decided| &decided.gpus);
    shape.is_none_or(|shape| !all.any(|gpu| shape.unhealthy.contains(gpu)))
}

/// What a pod uses of the quota of its queue while it is on a node, in thousandths of a GPU.
fn uses(pod: &Pod) -> u64 {
    if pod.spec.node_name.is_none() || pod.has_ended() || Assignment::of(pod).is_none() {
        return 0;
    }
    let request = Request::of(pod, names::RESOURCE);
    request.map_or(0, |r| u64::from(r.gpus) * u64::from(r.knobs.sm_permille))
}

/// A GPU of a node falls ill, or all are well again.
fn sicken(node: &mut Node) {
    let annotations = node.metadata.annotations.get_or_insert_default();
    let Some(text) = annotations.get_mut(names::INVENTORY) else { return };
    let Ok(mut inventory) = serde_json::from_str::<serde_json::Value>(text) else { return };
    let sick = inventory["unhealthy"]["0"].is_null();
    inventory["unhealthy"] = if sick { json!({"0": "it is lost"}) } else { json!({}) };
    let gpus = inventory["gpus"].as_u64().unwrap_or(0) - u64::from(sick);
    *text = inventory.to_string();
    let status = node.status.get_or_insert_default();
    let places = Quantity((gpus * u64::from(SLOTS)).to_string());
    status.allocatable.get_or_insert_default().insert(names::RESOURCE.into(), places);
}

struct Fuzz {
    api: Api,
    world: World,
    settings: Settings,
    rng: Rng,
    now: Time,
    /// Writes that were not answered yet.
    under_way: VecDeque<Write>,
    /// Why pods wait, as they were told last.
    told: BTreeMap<String, String>,
    out: Outcome,
    counts: Counts,
    faults: bool,
    /// Whether nodes are as they are for so long that all writes were decided for them.
    calm: bool,
    /// Whether quotas are as they are for so long that nothing may be bound beyond them.
    keeps_quotas: bool,
}

impl Fuzz {
    fn operation(&mut self) {
        self.now += Span(self.rng.below(400_000));
        match self.rng.below(100) {
            0..=17 => self.make_pods(),
            18..=23 => self.delete_pod(),
            24..=39 => (0..3).for_each(|_| self.progress()),
            40 if self.rng.chance(0.3) => self.change_node(),
            41 if self.rng.chance(0.5) => self.change_queue(),
            42 if self.rng.chance(0.1) => self.change_profile(),
            43 => self.make_node(),
            44 => self.resize(),
            45 if self.rng.chance(0.3) => self.restart(),
            46 if self.rng.chance(0.5) => self.relist(),
            47..=59 => self.agents(),
            60..=79 => self.tell(),
            _ => self.answer(),
        }
        self.step();
        self.check();
    }

    fn step(&mut self) {
        let writes = self.world.step(self.now);
        self.under_way.extend(writes);
        let counts = self.world.counts();
        self.out.bound += counts.bound.saturating_sub(self.counts.bound);
        self.out.evicted += counts.evicted.saturating_sub(self.counts.evicted);
        self.out.changed += counts.changed.saturating_sub(self.counts.changed);
        self.out.parts += counts.parts.saturating_sub(self.counts.parts);
        self.counts = counts;
    }

    // ---- what happens in a cluster -----------------------------------------------------------

    fn make_pods(&mut self) {
        if self.api.pods.len() >= CROWD {
            return;
        }
        let gang = self.rng.chance(0.15);
        let pods = if gang { 2 + self.rng.below(3) } else { 1 };
        let owned = self.rng.chance(0.6);
        let owner = format!("owner-{}", self.api.made);
        let gpus = 1 + u64::from(self.rng.chance(0.2));
        let (share, mem) = (self.rng.below(4), self.rng.below(4) * 8000);
        let class = ["guaranteed", "best-effort", ""][self.rng.below(3) as usize];
        let foreign = self.rng.chance(0.1);
        let selector = self.rng.below(8);
        let profile = format!("kind-{}", self.rng.below(5));
        let gated = self.rng.chance(0.05);
        let queue = self.rng.below(2 * QUEUES);
        for _ in 0..pods {
            let mut annotations = BTreeMap::from([(names::PROFILE.to_string(), profile.clone())]);
            if share > 0 {
                annotations.insert(names::SHARE.into(), (share * 25).to_string());
            }
            if mem > 0 {
                annotations.insert(names::MEMORY.into(), mem.to_string());
            }
            if !class.is_empty() {
                annotations.insert(names::CLASS.into(), class.into());
            }
            let label = names::GROUP_LABELS[0];
            if gang {
                annotations.insert(names::GROUP_SIZE.into(), pods.to_string());
            }
            let scheduler = if foreign { "default-scheduler" } else { names::SCHEDULER };
            let mut spec = json!({
                "schedulerName": scheduler,
                "containers": [{"name": "x", "resources": {
                    "requests": {"cpu": (1 + self.rng.below(3)).to_string(), "memory": "1Gi"},
                    "limits": if foreign { json!({}) } else {
                        json!({names::RESOURCE: gpus.to_string()})
                    }}}],
            });
            if selector == 0 {
                spec["nodeSelector"] = json!({"zone": "x"});
            } else if selector == 1 {
                spec["tolerations"] = json!([{"key": "odd", "operator": "Exists"}]);
            }
            if gated {
                spec["schedulingGates"] = json!([{"name": "wait"}]);
            }
            let mut pod: Pod = serde_json::from_value(json!({"spec": spec})).expect("it is a pod");
            pod.metadata.annotations = Some(annotations);
            let labels = pod.metadata.labels.get_or_insert_default();
            if gang {
                labels.insert(label.into(), owner.clone());
            }
            if queue < QUEUES {
                labels.insert(names::QUEUE.into(), format!("queue-{queue}"));
            }
            if owned {
                pod.metadata.owner_references = Some(vec![OwnerReference {
                    controller: Some(true),
                    uid: owner.clone(),
                    name: owner.clone(),
                    ..OwnerReference::default()
                }]);
            }
            self.create(pod);
        }
    }

    fn create(&mut self, mut pod: Pod) {
        self.api.made += 1;
        self.out.pods += 1;
        let uid = format!("uid-{:06}", self.api.made);
        pod.metadata.name = Some(format!("pod-{}", self.api.made));
        pod.metadata.namespace = Some("ns".into());
        pod.metadata.uid = Some(uid.clone());
        pod.metadata.deletion_timestamp = None;
        if let Some(annotations) = &mut pod.metadata.annotations {
            annotations.remove(names::ASSIGNMENT);
            annotations.remove(names::APPLIED);
        }
        pod.spec.node_name = None;
        pod.status = None;
        // A foreign pod is bound by its own scheduler at once.
        if pod.spec.scheduler_name.as_deref() != Some(names::SCHEDULER) {
            let Some(node) = self.any_node() else { return };
            pod.spec.node_name = Some(node);
        }
        self.put(pod);
    }

    fn put(&mut self, pod: Pod) {
        let uid = pod.uid().to_string();
        self.api.news.push_back(News::Pod(Box::new(pod.clone())));
        let grace = self.api.pods.get(&uid).map_or(0, |h| h.grace);
        self.api.pods.insert(uid, Held { pod, grace });
    }

    fn any_node(&mut self) -> Option<String> {
        let all: Vec<&String> = self.api.nodes.keys().collect();
        let n = all.len() as u64;
        (n > 0).then(|| all[self.rng.below(n) as usize].clone())
    }

    fn any_pod(&mut self) -> Option<String> {
        let n = self.api.pods.len() as u64;
        if n == 0 {
            return None;
        }
        let at = self.rng.below(n) as usize;
        self.api.pods.keys().nth(at).cloned()
    }

    /// A pod is deleted, and its owner makes another; or the owner is deleted with all its pods.
    fn delete_pod(&mut self) {
        let Some(uid) = self.any_pod() else { return };
        let owner = owner_of(&self.api.pods[&uid].pod);
        match owner.filter(|_| self.rng.chance(0.7)) {
            None => self.delete(&uid),
            Some(owner) => {
                let of = |h: &&Held| owner_of(&h.pod).as_ref() == Some(&owner);
                let all: Vec<String> =
                    self.api.pods.values().filter(of).map(|h| h.pod.uid().into()).collect();
                self.api.wanted.retain(|(o, _)| *o != owner);
                self.api.deleted.insert(owner);
                all.iter().for_each(|uid| self.delete(uid));
            }
        }
    }

    /// As the API server deletes: at once if it is on no node, else after its grace period.
    fn delete(&mut self, uid: &str) {
        let Some(held) = self.api.pods.get_mut(uid) else { return };
        if held.pod.spec.node_name.is_none() || held.pod.has_ended() {
            self.gone(uid);
        } else if held.pod.metadata.deletion_timestamp.is_none() {
            held.grace = 1 + self.rng.below(4) as u32;
            held.pod.metadata.deletion_timestamp = Some(Timestamp(jiff::Timestamp::default()));
            let pod = held.pod.clone();
            self.put(pod);
        }
    }

    fn gone(&mut self, uid: &str) {
        let Some(held) = self.api.pods.remove(uid) else { return };
        self.api.news.push_back(News::PodGone(uid.into()));
        let owner = owner_of(&held.pod).filter(|o| !self.api.deleted.contains(o));
        if let Some(owner) = owner.filter(|_| held.pod.phase() != "Succeeded") {
            // Its owner makes another one, sooner or later.
            self.api.wanted.push_back((owner, held.pod));
        }
    }

    /// Pods that were bound to a node that is gone are removed, as the garbage collector does.
    fn collect(&mut self) {
        let nodes = &self.api.nodes;
        let lost =
            |h: &&Held| h.pod.spec.node_name.as_ref().is_some_and(|n| !nodes.contains_key(n));
        let lost: Vec<String> =
            self.api.pods.values().filter(lost).map(|h| h.pod.uid().into()).collect();
        lost.iter().for_each(|uid| self.gone(uid));
    }

    /// Kubelets and owners do what they do.
    fn progress(&mut self) {
        if self.rng.chance(0.1) {
            self.collect();
        }
        if self.rng.chance(0.5)
            && let Some((_, like)) = self.api.wanted.pop_front()
        {
            self.create(like);
        }
        let Some(uid) = self.any_pod() else { return };
        let held = self.api.pods.get_mut(&uid).expect("it was just found");
        if held.pod.metadata.deletion_timestamp.is_some() {
            held.grace = held.grace.saturating_sub(1);
            if held.grace == 0 {
                self.gone(&uid);
            }
            return;
        }
        if held.pod.spec.scheduling_gates.is_some() {
            held.pod.spec.scheduling_gates = None;
            let pod = held.pod.clone();
            self.put(pod);
            return;
        }
        if held.pod.spec.node_name.is_none() {
            return;
        }
        let next = match (held.pod.phase(), self.rng.below(10)) {
            ("Pending", _) => "Running",
            ("Running", 0..=3) => "Succeeded",
            ("Running", 4) => "Failed",
            ("Succeeded" | "Failed", _) => {
                self.gone(&uid);
                return;
            }
            _ => return,
        };
        let mut pod = held.pod.clone();
        pod.status = Some(PodStatus { phase: Some(next.into()), ..PodStatus::default() });
        self.put(pod);
    }

    /// Agents put assignments into force, and measure.
    fn agents(&mut self) {
        let Some(uid) = self.any_pod() else { return };
        let mut pod = self.api.pods[&uid].pod.clone();
        let Some(assignment) = Assignment::of(&pod) else { return };
        let applied = serde_json::to_string(&assignment.applied()).expect("it can be written");
        let step_s = 0.1 + self.rng.unit();
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(names::APPLIED.into(), applied);
        annotations.insert(names::MEASURED.into(), json!({"step_s": step_s}).to_string());
        self.put(pod);
    }

    fn resize(&mut self) {
        let Some(uid) = self.any_pod() else { return };
        let mut pod = self.api.pods[&uid].pod.clone();
        let percent = 10 * (1 + self.rng.below(10));
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(names::LIMIT.into(), percent.to_string());
        self.put(pod);
    }

    fn change_queue(&mut self) {
        let name = format!("queue-{}", self.rng.below(QUEUES));
        let grant = self.rng.chance(0.8).then(|| Grant {
            weight: (1 + self.rng.below(3)) as f64,
            quota: self.rng.chance(0.9).then(|| 250 * self.rng.below(24)),
            borrows: self.rng.chance(0.5),
        });
        match grant.clone() {
            Some(grant) => drop(self.api.queues.insert(name.clone(), grant)),
            None => drop(self.api.queues.remove(&name)),
        }
        self.api.news.push_back(News::Queue(name, grant));
    }

    fn change_profile(&mut self) {
        let name = format!("kind-{}", self.rng.below(5));
        let expected = self.rng.chance(0.8).then(|| Expected {
            profile: Profile::of_step(0.1 + self.rng.unit()),
            mem_mib: (self.rng.below(3) * 4000) as u32,
        });
        match expected.clone() {
            Some(expected) => drop(self.api.profiles.insert(name.clone(), expected)),
            None => drop(self.api.profiles.remove(&name)),
        }
        self.api.news.push_back(News::Profile(name, expected.map(Box::new)));
    }

    fn make_node(&mut self) {
        let name = format!("node-{}", self.rng.below(NODES));
        if self.api.nodes.contains_key(&name) {
            if self.rng.chance(0.2) {
                self.api.nodes.remove(&name);
                self.api.news.push_back(News::NodeGone(name.clone()));
                // What ran there is gone with it.
                let on = |h: &&Held| h.pod.spec.node_name.as_deref() == Some(&name);
                let pods: Vec<String> =
                    self.api.pods.values().filter(on).map(|h| h.pod.uid().into()).collect();
                pods.iter().for_each(|uid| self.gone(uid));
            }
            return;
        }
        // A machine keeps its GPUs: a node that comes back under its name is the same one.
        let number = name.as_bytes().iter().fold(0, |sum, b| sum + u64::from(*b));
        let gpus = 1 + number % 4;
        let zone = ["x", "y"][self.rng.below(2) as usize];
        let mem_mib = [16_000, 32_000][(number % 2) as usize];
        let inventory =
            json!({"gpus": gpus, "model": "a100", "mem_mib": mem_mib, "slots": SLOTS}).to_string();
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {"zone": zone},
                         "annotations": {names::INVENTORY: inventory}},
            "status": {
                "allocatable": {names::RESOURCE: (gpus * u64::from(SLOTS)).to_string(),
                                "cpu": "16", "memory": "64Gi"},
                "conditions": [{"type": "Ready", "status": "True"}]},
        }))
        .expect("it is a node");
        self.put_node(node);
    }

    fn put_node(&mut self, node: Node) {
        self.api.news.push_back(News::Node(Box::new(node.clone())));
        self.api.nodes.insert(node.name().into(), node);
    }

    fn change_node(&mut self) {
        let Some(name) = self.any_node() else { return self.make_node() };
        let mut node = self.api.nodes[&name].clone();
        let ready = |is: bool| if is { "True" } else { "False" };
        match self.rng.below(7) {
            6 => sicken(&mut node),
            0 | 1 => {
                let status = node.status.get_or_insert_default();
                let conditions = status.conditions.get_or_insert_default();
                let is = conditions[0].status == "True";
                conditions[0].status = ready(!is).into();
            }
            2 => {
                let spec = node.spec.get_or_insert_default();
                spec.unschedulable = Some(spec.unschedulable != Some(true));
            }
            3 => {
                let spec = node.spec.get_or_insert_default();
                let odd = Taint { key: "odd".into(), value: None, effect: "NoSchedule".into() };
                spec.taints = if spec.taints.is_some() { None } else { Some(vec![odd]) };
            }
            _ => {
                let labels = node.metadata.labels.get_or_insert_default();
                let zone = if labels.get("zone").is_some_and(|z| z == "x") { "y" } else { "x" };
                labels.insert("zone".into(), zone.into());
            }
        }
        self.put_node(node);
    }

    // ---- what passes between server and scheduler --------------------------------------------

    /// Watchers are told some of the news, in order.
    fn tell(&mut self) {
        for _ in 0..=self.rng.below(6) {
            match self.api.news.pop_front() {
                Some(News::Pod(pod)) => self.world.pod(*pod),
                Some(News::PodGone(uid)) => self.world.pod_gone(&uid),
                Some(News::Node(node)) => self.world.node(*node),
                Some(News::NodeGone(name)) => self.world.node_gone(&name),
                Some(News::Queue(name, Some(grant))) => self.world.queue(&name, grant),
                Some(News::Queue(name, None)) => self.world.queue_gone(&name),
                Some(News::Profile(name, expected)) => {
                    self.world.profile(&name, expected.map(|one| *one));
                }
                None => return,
            }
        }
    }

    /// A watch is lost (410 Gone): everything is listed anew.
    fn relist(&mut self) {
        self.out.relists += 1;
        self.api.news.clear();
        for node in self.api.nodes.values() {
            self.world.node(node.clone());
        }
        for held in self.api.pods.values() {
            self.world.pod(held.pod.clone());
        }
        let pods: BTreeSet<String> = self.api.pods.keys().cloned().collect();
        let nodes: BTreeSet<String> = self.api.nodes.keys().cloned().collect();
        self.world.pods_listed(&pods);
        self.world.nodes_listed(&nodes);
        for (name, grant) in &self.api.queues {
            self.world.queue(name, grant.clone());
        }
        for (name, expected) in &self.api.profiles {
            self.world.profile(name, Some(expected.clone()));
        }
        self.world.queues_listed(&self.api.queues.keys().cloned().collect());
        self.world.profiles_listed(&self.api.profiles.keys().cloned().collect());
    }

    /// The scheduler is killed; another one knows nothing but what the server says. Writes that
    /// were under way may still arrive.
    fn restart(&mut self) {
        self.out.restarts += 1;
        self.check_journal();
        for write in std::mem::take(&mut self.under_way) {
            if self.rng.chance(0.5) {
                self.apply(&write);
            }
        }
        self.settings.term += 1;
        self.world = World::new(self.settings.clone()).expect("the policy was built before");
        self.counts = Counts::default();
        self.relist();
    }

    /// The server answers a write, or not.
    fn answer(&mut self) {
        let n = self.under_way.len() as u64;
        if n == 0 {
            return;
        }
        let at = self.rng.below(n.min(8)) as usize;
        let write = self.under_way.remove(at).expect("it was just counted");
        let answer = match self.rng.below(20) {
            // 429: not now.
            0 if self.faults => Answer::Later,
            // 500 or a lost connection, before or after it was written.
            1 if self.faults => Answer::Lost,
            2 if self.faults => {
                self.apply(&write);
                Answer::Lost
            }
            _ => self.apply(&write),
        };
        if !matches!(write, Write::Explain { .. }) {
            self.world.answer(&write, answer);
        }
    }

    /// As a real API server does it: 404 and 409 are refusals, except of a binding that is there
    /// already, which is what a repeated binding wants to know.
    fn apply(&mut self, write: &Write) -> Answer {
        let Some(held) = self.api.pods.get(&write.pod().uid) else { return Answer::Refused };
        let mut pod = held.pod.clone();
        match write {
            Write::Bind { node, assignment, .. } => {
                let same = pod.spec.node_name.as_ref() == Some(node)
                    && pod.annotation(names::ASSIGNMENT) == Some(assignment);
                let gated = pod.spec.scheduling_gates.is_some();
                if same {
                    return Answer::Done;
                } else if pod.spec.node_name.is_some() || gated || held.grace > 0 {
                    return Answer::Refused;
                }
                pod.spec.node_name = Some(node.clone());
                let annotations = pod.metadata.annotations.get_or_insert_default();
                annotations.insert(names::ASSIGNMENT.into(), assignment.clone());
                let may = self.api.nodes.get(node).map(|n| {
                    crate::constraint::Constraint::of(&pod).allows(n)
                        && is_well(n, assignment)
                        && self.cpu_used(node) + pod.room().0 <= n.has("cpu", 1e-3)
                });
                if may == Some(false) && self.calm && self.api.news.is_empty() {
                    self.out.misplaced += 1;
                    let name = pod.name();
                    let what = format!("{name} was bound to {node}, which has no room for it");
                    self.out.first.get_or_insert(what);
                }
                if self.keeps_quotas {
                    self.check_quota(&pod);
                }
                self.put(pod);
            }
            Write::Assign { assignment, .. } => {
                let annotations = pod.metadata.annotations.get_or_insert_default();
                annotations.insert(names::ASSIGNMENT.into(), assignment.clone());
                self.put(pod);
            }
            Write::Evict { .. } => {
                // A disruption budget may say: not now.
                if self.faults && self.rng.chance(0.2) {
                    return Answer::Later;
                }
                let uid = pod.uid().to_string();
                self.delete(&uid);
            }
            Write::Explain { why, .. } => {
                self.told.insert(pod.uid().into(), why.clone());
            }
        }
        Answer::Done
    }
}
