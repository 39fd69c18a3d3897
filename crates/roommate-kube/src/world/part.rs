//! A part: an engine over the nodes that there are, and its journal from the first decision on.
//!
//! A part ends when the nodes change in a way that an engine cannot be told (a new node, a new kind
//! of constraint, a long journal). The next one begins with everything where it is, as after a
//! restart of the scheduler: what pods and nodes say is all that is needed.

use crate::constraint::Constraint;
use crate::names;
use crate::objects::Node;
use crate::request::Request;
use crate::world::Settings;
use roommate_core::cluster::{Cluster, GpuModel, NodeGroup};
use roommate_core::engine::Engine;
use roommate_core::event::{Action, Event, Placement};
use roommate_core::idx::{GpuIdx, JobIdx, NodeIdx, ProfileIdx, TeamIdx};
use roommate_core::job::Spec;
use roommate_core::journal::{
    CLUSTER, Head, JobLine, Observer, ProfileLine, StepView, TeamLine, Writer,
};
use roommate_core::policy::PolicyError;
use roommate_core::profile::Profile;
use roommate_core::time::Time;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex};

/// What the scheduler knows of a node's GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// GPUs.
    pub gpus: u16,
    /// Numbers of those that cannot be used now, ascending: nothing is placed on them.
    pub unhealthy: Vec<u16>,
    /// Name of their model, in lower case.
    pub model: String,
    /// Memory of each, MiB; 0 = not known.
    pub mem_mib: u32,
    /// Pods that may share each.
    pub slots: u32,
    /// CPU that pods may use, in thousandths of a core.
    pub cpu_milli: u32,
    /// Host memory that pods may use, MiB.
    pub host_mib: u32,
}

/// The inventory that a node's agent publishes.
#[derive(Deserialize)]
struct Inventory {
    gpus: u16,
    model: String,
    #[serde(default)]
    mem_mib: u32,
    slots: u32,
    #[serde(default)]
    unhealthy: BTreeMap<u16, String>,
}

impl Shape {
    /// What a node says of its GPUs; none if it has no GPUs for pods.
    pub fn of(node: &Node, resource: &str) -> Option<Self> {
        let places = node.has(resource, 1.0);
        let inventory = node.metadata.annotations.as_ref().and_then(|a| a.get(names::INVENTORY));
        let inventory = inventory.and_then(|text| serde_json::from_str::<Inventory>(text).ok());
        let labelled = |name: &str| node.label(name).and_then(|v| v.parse::<u32>().ok());
        let inventory = inventory.unwrap_or_else(|| {
            let slots = labelled(names::SLOTS).unwrap_or(1).max(1);
            let product = node.label("nvidia.com/gpu.product").unwrap_or("gpu");
            let mem_mib = labelled("nvidia.com/gpu.memory").unwrap_or(0);
            let gpus = (places / u64::from(slots)).min(64) as u16;
            let model = model_name(product);
            Inventory { gpus, model, mem_mib, slots, unhealthy: BTreeMap::new() }
        });
        let gpus = inventory.gpus;
        let unhealthy: Vec<u16> =
            inventory.unhealthy.into_keys().filter(|number| *number < gpus).collect();
        let healthy = u64::from(gpus) - unhealthy.len() as u64;
        // The kubelet offers fewer places than the inventory says: devices of it are not healthy.
        (gpus > 0 && places >= healthy * u64::from(inventory.slots)).then(|| Self {
            gpus,
            unhealthy,
            model: model_name(&inventory.model),
            mem_mib: inventory.mem_mib,
            slots: inventory.slots,
            cpu_milli: node.has("cpu", 1e-3).min(u64::from(u32::MAX / 2)) as u32,
            host_mib: node.has("memory", 1024.0 * 1024.0).min(u64::from(u32::MAX / 2)) as u32,
        })
    }
}

impl Shape {
    /// Whether an engine sees the same GPUs.
    pub(super) fn has_gpus_of(&self, other: &Self) -> bool {
        (self.gpus, &self.unhealthy, &self.model, self.mem_mib)
            == (other.gpus, &other.unhealthy, &other.model, other.mem_mib)
    }

    /// Whether any of its GPUs can be used.
    pub(super) fn is_usable(&self) -> bool {
        self.healthy().next().is_some()
    }

    /// Numbers of the GPUs that can be used.
    pub(crate) fn healthy(&self) -> impl Iterator<Item = u16> {
        (0..self.gpus).filter(move |number| self.unhealthy.binary_search(number).is_err())
    }
}

/// The model of a product such as `NVIDIA-A100-SXM4-80GB`: a short name where one is known.
fn model_name(product: &str) -> String {
    let product = product.to_ascii_lowercase();
    let short = ["h200", "h100", "a100", "v100", "p100", "k80", "t4", "cpu"];
    let words = || product.split(|c: char| !c.is_ascii_alphanumeric());
    if let Some(known) = short.iter().find(|name| words().any(|w| w == **name)) {
        return (*known).into();
    }
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' || c == '_' { c } else { '-' };
    let name: String = product.chars().map(plain).collect();
    if name.is_empty() { "gpu".into() } else { name }
}

/// A node of a part.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PartNode {
    pub(super) name: String,
    pub(super) shape: Shape,
    /// Its class: nodes of one class have the same model and are allowed to the same pods.
    pub(super) class: u8,
    first: u32,
    /// Numbers of its GPUs, as the engine counts them.
    pub(super) numbers: Vec<u16>,
}

/// Most classes of nodes: as many as a job's mask of GPU models has bits.
pub(super) const MOST_CLASSES: usize = 32;

/// How nodes fall into classes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Classes {
    /// All constraints that pods have.
    constraints: Vec<Constraint>,
    /// The class of each node, by name of the node.
    of: Vec<(String, u8)>,
    /// For each class: its model, memory of its GPUs, and which constraints allow it.
    kinds: Vec<(String, u32, Vec<bool>)>,
}

impl Classes {
    /// The classes of these nodes, in the order of their names, for pods with these constraints.
    pub(super) fn of<'a>(
        nodes: impl Iterator<Item = (&'a Node, &'a Shape)>,
        constraints: Vec<Constraint>,
    ) -> Self {
        let mut classes = Self { constraints, of: Vec::new(), kinds: Vec::new() };
        for (node, shape) in nodes {
            let verdicts = classes.constraints.iter().map(|c| c.allows(node)).collect();
            let kind = (shape.model.clone(), shape.mem_mib, verdicts);
            let known = classes.kinds.iter().position(|k| *k == kind);
            let class = known.unwrap_or_else(|| {
                // Nodes beyond the most classes are left out: nothing is placed on them.
                if classes.kinds.len() < MOST_CLASSES {
                    classes.kinds.push(kind);
                    classes.kinds.len() - 1
                } else {
                    MOST_CLASSES
                }
            });
            classes.of.push((node.name().into(), class as u8));
        }
        classes
    }

    /// The classes that a constraint allows, as a mask; none if the constraint is new.
    pub(super) fn mask(&self, constraint: &Constraint) -> Option<u32> {
        let at = self.constraints.iter().position(|c| c == constraint)?;
        let bit = |(i, kind): (usize, &(String, u32, Vec<bool>))| u32::from(kind.2[at]) << i;
        Some(self.kinds.iter().enumerate().map(bit).sum())
    }

    /// Whether another constraint would leave every class whole.
    pub(super) fn stay_with(&self, allows: &dyn Fn(&str) -> bool) -> bool {
        let mut verdicts = vec![None; self.kinds.len()];
        self.of.iter().filter(|(_, class)| usize::from(*class) < MOST_CLASSES).all(
            |(name, class)| {
                let verdict = allows(name);
                *verdicts[usize::from(*class)].get_or_insert(verdict) == verdict
            },
        )
    }

    /// Adds a constraint that leaves every class whole.
    pub(super) fn add(&mut self, constraint: Constraint, allows: &dyn Fn(&str) -> bool) {
        for (class, kind) in self.kinds.iter_mut().enumerate() {
            let one = self.of.iter().find(|(_, c)| usize::from(*c) == class);
            kind.2.push(one.is_some_and(|(name, _)| allows(name)));
        }
        self.constraints.push(constraint);
    }

    pub(super) fn constraints(&self) -> Vec<Constraint> {
        self.constraints.clone()
    }

    /// Whether the only class of these is like one of ours.
    pub(super) fn is_like(&self, class: u8, one: &Self) -> bool {
        self.kinds.get(usize::from(class)) == one.kinds.first()
    }

    pub(super) fn class_of(&self, node: &str) -> Option<u8> {
        let at = self.of.binary_search_by(|(name, _)| name.as_str().cmp(node)).ok()?;
        Some(self.of[at].1).filter(|class| usize::from(*class) < MOST_CLASSES)
    }

    /// The models as a cluster has them: two classes of one model differ in their names.
    fn gpu_models(&self) -> Vec<GpuModel> {
        let mut models: Vec<GpuModel> = Vec::new();
        for (model, mem_mib, _) in &self.kinds {
            let before = self.kinds[..models.len()].iter().filter(|k| k.0 == *model).count();
            let name = if before == 0 { model.clone() } else { format!("{model}.{}", before + 1) };
            let usual: Option<Cluster> = format!("1x1:{model}").parse().ok();
            let usual = usual.map(|c| c.gpu_models[0].clone());
            let (speed, price_usd_h) = usual.map_or((1.0, 1.0), |m| (m.speed, m.price_usd_h));
            models.push(GpuModel { name, mem_mib: *mem_mib, speed, price_usd_h });
        }
        models
    }
}

/// A journal that is written and can be read meanwhile.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A part of the scheduler's life.
pub(super) struct Part {
    pub(super) engine: Engine,
    writer: Writer<Log>,
    log: Log,
    pub(super) nodes: Vec<PartNode>,
    by_name: HashMap<String, NodeIdx>,
    kinds: HashMap<String, ProfileIdx>,
    /// The profiles that pods named.
    profiles: HashSet<String>,
    teams: HashMap<String, TeamIdx>,
    pub(super) classes: Classes,
    pub(super) wake: Option<Time>,
    /// Work of each job, by its index.
    pub(super) works: Vec<u32>,
}

impl Part {
    /// A part over these nodes, in the order of their names; all have GPUs that can be used.
    pub(super) fn begin(
        settings: &Settings,
        nodes: Vec<(String, Shape)>,
        classes: Classes,
    ) -> Result<Self, PolicyError> {
        let mut cluster = Cluster { gpu_models: classes.gpu_models(), groups: Vec::new() };
        let (mut known, mut first) = (Vec::new(), 0);
        for (name, shape) in nodes {
            let Some(class) = classes.class_of(&name) else { continue };
            let numbers: Vec<u16> = shape.healthy().collect();
            let group = NodeGroup {
                count: 1,
                gpus: numbers.len() as u16,
                gpu_model: class,
                cpu_milli: shape.cpu_milli,
                host_mib: shape.host_mib,
            };
            match cluster.groups.last_mut() {
                Some(last) if (NodeGroup { count: 1, ..last.clone() }) == group => last.count += 1,
                _ => cluster.groups.push(group),
            }
            let gpus = numbers.len() as u32;
            known.push(PartNode { name, shape, class, first, numbers });
            first += gpus;
        }
        // What is written has to be what is decided with.
        let cluster: Cluster = if cluster.groups.is_empty() {
            cluster
        } else {
            cluster.to_string().parse().unwrap_or(cluster)
        };
        let run = (&*settings.policy, settings.all_params()?);
        let mut head = Head::new(CLUSTER, run, cluster, settings.costs, settings.seed);
        head.nodes = known.iter().map(|node| node.name.clone()).collect();
        let log = Log::default();
        let mut writer = Writer::new(log.clone());
        writer.head(&head);
        let by_name = known.iter().enumerate();
        let by_name = by_name.map(|(i, n)| (n.name.clone(), NodeIdx(i as u32))).collect();
        Ok(Self {
            engine: head.engine()?,
            writer,
            log,
            nodes: known,
            by_name,
            kinds: HashMap::new(),
            profiles: HashSet::new(),
            teams: HashMap::new(),
            classes,
            wake: None,
            works: Vec::new(),
        })
    }

    /// The journal so far.
    pub(super) fn journal(&self) -> Vec<u8> {
        self.log.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Looks at it where it is.
    pub(super) fn read_journal(&self, read: &mut dyn FnMut(&[u8])) {
        read(&self.log.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }

    /// Its length in bytes.
    pub(super) fn length(&self) -> usize {
        self.log.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).len()
    }

    pub(super) fn node(&self, name: &str) -> Option<NodeIdx> {
        self.by_name.get(name).copied()
    }

    /// A GPU by its node and its number there.
    pub(super) fn gpu(&self, node: &str, number: u16) -> Option<GpuIdx> {
        let node = &self.nodes[self.node(node)?.0 as usize];
        let at = node.numbers.binary_search(&number).ok()?;
        Some(GpuIdx(node.first + at as u32))
    }

    /// The node of a GPU, and the number of the GPU there.
    pub(super) fn place(&self, gpu: GpuIdx) -> (&str, u16) {
        let node = &self.nodes[self.engine.state().gpu(gpu).node.0 as usize];
        (&node.name, node.numbers[(gpu.0 - node.first) as usize])
    }

    /// Whether pods named this profile.
    pub(super) fn knows(&self, profile: &str) -> bool {
        self.profiles.contains(profile)
    }

    /// The kind of work of pods; what is known of it beforehand counts when its first pods come.
    pub(super) fn kind(&mut self, of: &Request, known: Option<&Profile>) -> ProfileIdx {
        let name = of.kind();
        if let Some(idx) = self.kinds.get(&name) {
            return *idx;
        }
        let profile = of.expected(known);
        let idx = self.engine.add_profile(profile.clone());
        self.writer.profile(&ProfileLine { idx, name: name.clone(), profile });
        self.profiles.insert(of.profile.clone());
        self.kinds.insert(name, idx);
        idx
    }

    pub(super) fn team(&mut self, name: &str) -> TeamIdx {
        if let Some(idx) = self.teams.get(name) {
            return *idx;
        }
        let idx = TeamIdx(self.teams.len() as u32);
        self.writer.team(&TeamLine { idx, name: name.into() });
        self.teams.insert(name.into(), idx);
        idx
    }

    /// Registers the job of a work; `on` says where it runs already.
    pub(super) fn add_job(
        &mut self,
        work: u32,
        name: &str,
        spec: Spec,
        on: Option<Placement>,
    ) -> JobIdx {
        let mut line = JobLine::new(JobIdx(self.works.len() as u32), name.into(), spec);
        line.on = on;
        self.writer.job(&line);
        self.works.push(work);
        match line.on {
            Some(on) => self.engine.add_found_job(line.spec, on),
            None => self.engine.add_job(line.spec),
        }
    }

    /// Tells the engine what happened; returns what it asks for, and how many facts it could not
    /// believe.
    pub(super) fn step(&mut self, now: Time, facts: &[Event]) -> (Vec<Action>, usize) {
        let step = self.engine.step(now, facts);
        if step.asked || !facts.is_empty() {
            self.writer.step(&StepView::of(now, facts, &step));
        }
        self.wake = step.wake;
        (step.actions.to_vec(), step.contradictions.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node(value: serde_json::Value) -> Node {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn shapes_are_read_from_inventories_and_labels() {
        let plain = node(json!({
            "metadata": {"name": "a", "labels": {
                "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920",
                "roommate.dev/slots": "4"}},
            "status": {"allocatable": {"roommate.dev/gpu": "8", "cpu": "16", "memory": "64Gi"}},
        }));
        let shape = Shape::of(&plain, names::RESOURCE).unwrap();
        let expect = Shape {
            gpus: 2,
            unhealthy: Vec::new(),
            model: "a100".into(),
            mem_mib: 81_920,
            slots: 4,
            cpu_milli: 16_000,
            host_mib: 65_536,
        };
        assert_eq!(shape, expect);
        let told = |places: &str| {
            node(json!({
                "metadata": {"name": "a", "annotations": {
                    "roommate.dev/inventory": r#"{"gpus":2,"model":"cpu","slots":8}"#}},
                "status": {"allocatable": {"roommate.dev/gpu": places}},
            }))
        };
        assert_eq!(Shape::of(&told("16"), names::RESOURCE).unwrap().gpus, 2);
        assert_eq!(Shape::of(&told("15"), names::RESOURCE), None, "a device is not healthy");
        let mut one_left = told("8");
        let text = r#"{"gpus":2,"model":"cpu","slots":8,"unhealthy":{"0":"core 0 is offline"}}"#;
        one_left.metadata.annotations = Some([(names::INVENTORY.into(), text.into())].into());
        let shape = Shape::of(&one_left, names::RESOURCE).unwrap();
        assert_eq!((shape.gpus, shape.healthy().collect::<Vec<_>>()), (2, vec![1]));
        assert_eq!(Shape::of(&node(json!({})), names::RESOURCE), None);
        assert_eq!(model_name("Quadro RTX 8000"), "quadro-rtx-8000");
        assert_eq!(model_name(""), "gpu");
    }

    #[test]
    fn nodes_that_the_same_pods_may_use_are_one_class() {
        let labelled = |name: &str, zone: &str| {
            node(json!({"metadata": {"name": name, "labels": {"zone": zone}}}))
        };
        let nodes = [labelled("a", "x"), labelled("b", "y"), labelled("c", "x")];
        let shape = Shape {
            gpus: 1,
            unhealthy: Vec::new(),
            model: "a100".into(),
            mem_mib: 0,
            slots: 1,
            cpu_milli: 0,
            host_mib: 0,
        };
        let select = |zone: &str| {
            let pod = json!({"spec": {"nodeSelector": {"zone": zone}}});
            Constraint::of(&serde_json::from_value(pod).unwrap())
        };
        let all = || nodes.iter().map(|n| (n, &shape));
        let mut classes = Classes::of(all(), vec![Constraint::default()]);
        assert_eq!(classes.mask(&Constraint::default()), Some(1));
        assert_eq!(classes.mask(&select("x")), None);
        let allows = |c: Constraint| {
            let nodes = nodes.clone();
            move |name: &str| nodes.iter().any(|n| n.name() == name && c.allows(n))
        };
        assert!(!classes.stay_with(&allows(select("x"))));
        assert!(classes.stay_with(&allows(select("z"))));
        classes.add(select("z"), &allows(select("z")));
        assert_eq!(classes.mask(&select("z")), Some(0));
        let classes = Classes::of(all(), vec![Constraint::default(), select("x")]);
        assert_eq!(classes.mask(&Constraint::default()), Some(0b11));
        assert_eq!(classes.mask(&select("x")), Some(0b01));
        assert_eq!((classes.class_of("b"), classes.class_of("d")), (Some(1), None));
        let names: Vec<String> = classes.gpu_models().into_iter().map(|m| m.name).collect();
        assert_eq!(names, ["a100", "a100.2"]);
    }
}
