//! What is counted. Where kube-scheduler counts the same, names and labels are its own, behind our
//! prefix. Samples that grow with the cluster are bounded, and what was left out is counted.

use crate::exposition::{Histogram, Page};
use crate::world::{Figures, NodeFigures, Pending, QueueFigures, TenantFigures, World};

/// Upper bounds of the classes of what a scheduler does, in seconds.
const WORK_S: &[f64] = &[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];
/// The same of waiting for GPUs.
const WAIT_S: &[f64] = &[
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0,
    14400.0, 86400.0,
];
/// Most nodes whose GPUs have samples.
const MOST_NODES: usize = 5_000;
/// Most pods with samples.
const MOST_PODS: usize = 10_000;
/// Most queues with samples.
const MOST_QUEUES: usize = 200;
const MIB: f64 = 1024.0 * 1024.0;

/// A metric of something: name, help, value.
type Metric<T, V = f64> = (&'static str, &'static str, fn(&T) -> V);

/// What the scheduler counts besides the world.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    /// The scheduler that pods name.
    profile: String,
    /// Deciding, for all that was observed together.
    pub(super) decide: Histogram,
    /// From the decision to bind a pod until it was bound.
    pub(super) scheduled: Histogram,
    /// The same where that failed.
    pub(super) failed: Histogram,
    /// Deciding that a pod waits.
    pub(super) unschedulable: Histogram,
    /// A binding, from when it was sent to its answer.
    pub(super) bind: Histogram,
    /// From when a pod was seen first to its binding.
    pub(super) wait: Histogram,
    /// Requests that failed.
    pub(super) failures: u64,
    /// Watches that had to begin anew.
    pub(super) relists: u64,
    /// Explanations that were dropped, because too many waited to be written.
    pub(super) dropped: u64,
}

impl Metrics {
    /// Nothing counted yet, by the scheduler of this name.
    pub(super) fn new(profile: &str) -> Self {
        let work = Histogram::new(WORK_S);
        Self {
            profile: profile.into(),
            decide: work.clone(),
            scheduled: work.clone(),
            failed: work.clone(),
            unschedulable: work.clone(),
            bind: work,
            wait: Histogram::new(WAIT_S),
            failures: 0,
            relists: 0,
            dropped: 0,
        }
    }

    /// All of it. `world` is what this scheduler leads, if it does.
    pub(super) fn page(&self, world: Option<&World>, term: u64) -> String {
        let mut page = Page::default();
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        page.gauge("roommate_build_info", "The version.").add(&version, 1.0);
        let leads = f64::from(u8::from(world.is_some()));
        page.gauge("roommate_leader", "Whether this scheduler leads.").add(&[], leads);
        let Some(world) = world else { return page.text() };
        page.gauge("roommate_leader_term", "Its term as leader.").add(&[], term as f64);
        self.attempts(&mut page);
        self.counts(&mut page, world);
        let figures = world.figures();
        pending(&mut page, &figures);
        nodes(&mut page, &figures.nodes);
        gpus_of_pods(&mut page, &figures.tenants);
        speeds_of_pods(&mut page, &figures.tenants);
        page.text()
    }

    fn attempts(&self, page: &mut Page) {
        let results = [
            ("scheduled", &self.scheduled),
            ("unschedulable", &self.unschedulable),
            ("error", &self.failed),
        ];
        let labels = |result| [("result", result), ("profile", self.profile.as_str())];
        let name = "roommate_schedule_attempts_total";
        let mut all = page.counter(name, "Attempts to bind a pod, by result.");
        for (result, durations) in results {
            all.add(&labels(result), durations.count() as f64);
        }
        let name = "roommate_scheduling_attempt_duration_seconds";
        let help = "Deciding about a pod and, if it gets a place, binding it.";
        let mut all = page.histogram(name, help);
        for (result, durations) in results {
            all.add_durations(&labels(result), durations);
        }
        for (name, help, durations) in [
            (
                "roommate_scheduling_algorithm_duration_seconds",
                "Deciding, for all that was observed together.",
                &self.decide,
            ),
            (
                "roommate_binding_duration_seconds",
                "A binding, from when it was sent to its answer.",
                &self.bind,
            ),
            (
                "roommate_pod_scheduling_sli_duration_seconds",
                "From when a pod was seen first without scheduling gates to its binding.",
                &self.wait,
            ),
        ] {
            page.histogram(name, help).add_durations(&[], durations);
        }
    }

    fn counts(&self, page: &mut Page, world: &World) {
        let counts = world.counts();
        for (name, help, n) in [
            ("roommate_preemption_victims_total", "Pods that were evicted.", counts.evicted),
            (
                "roommate_assignment_changes_total",
                "Assignments of pods on nodes that were changed.",
                counts.changed,
            ),
            ("roommate_journal_parts_total", "Parts of the journal begun.", counts.parts),
            (
                "roommate_contradictions_total",
                "Facts that could not be believed.",
                counts.contradictions,
            ),
            (
                "roommate_held_back_writes_total",
                "Writes that waited until the ledger had room for them.",
                counts.held_back,
            ),
            (
                "roommate_refused_writes_total",
                "Writes that the API server refused.",
                counts.refused,
            ),
            ("roommate_api_failures_total", "Requests that failed.", self.failures),
            ("roommate_watch_restarts_total", "Watches that began anew.", self.relists),
            (
                "roommate_dropped_explanations_total",
                "Explanations that were not written, because too many waited.",
                self.dropped,
            ),
        ] {
            page.counter(name, help).add(&[], n as f64);
        }
        let ledger = world.ledger();
        let help = "Pods that hold something in the ledger.";
        page.gauge("roommate_ledger_pods", help).add(&[], ledger.pods() as f64);
        let help = "GPUs of which more was given away than there is.";
        let over = ledger.over() as f64;
        page.gauge("roommate_ledger_over_allocated_gpus", help).add(&[], over);
    }
}

fn pending(page: &mut Page, figures: &Figures) {
    let help = "Pods that are not on a node, by why.";
    let mut all = page.gauge("roommate_pending_pods", help);
    for why in Pending::ALL {
        let n = figures.pending.get(&why).copied().unwrap_or(0);
        all.add(&[("queue", why.name())], n as f64);
    }
    // Queues of which there is no room for samples count together.
    let named = figures.queues.iter().take(MOST_QUEUES).map(|(name, of)| (name.as_str(), *of));
    let mut queues: Vec<(&str, QueueFigures)> = named.collect();
    if figures.queues.len() > MOST_QUEUES {
        let add = |mut all: QueueFigures, one: &QueueFigures| {
            all.pending += one.pending;
            all.placed += one.placed;
            all.promised_gpus += one.promised_gpus;
            all
        };
        let rest = figures.queues.values().skip(MOST_QUEUES);
        queues.push(("(others)", rest.fold(QueueFigures::default(), add)));
    }
    let each: [Metric<QueueFigures>; 3] = [
        ("roommate_queue_pending_pods", "Pods of a queue that wait.", |q| q.pending as f64),
        ("roommate_queue_placed_pods", "Pods of a queue on GPUs.", |q| q.placed as f64),
        (
            "roommate_queue_promised_gpus",
            "What is promised to the pods of a queue, in GPUs.",
            |q| q.promised_gpus,
        ),
    ];
    for (name, help, figure) in each {
        let mut all = page.gauge(name, help);
        for (queue, of) in &queues {
            all.add(&[("queue", queue)], figure(of));
        }
    }
}

fn nodes(page: &mut Page, nodes: &[NodeFigures]) {
    let each: [Metric<NodeFigures>; 6] = [
        ("roommate_node_gpus", "GPUs of a node; 0 while it is not ready.", |n| n.gpus.into()),
        ("roommate_node_gpus_in_use", "GPUs of a node with a pod.", |n| n.in_use as f64),
        ("roommate_node_gpus_shared", "GPUs of a node with several pods.", |n| n.shared as f64),
        ("roommate_node_promised_gpus", "What is promised to the pods of a node, in GPUs.", |n| {
            n.promised_gpus
        }),
        ("roommate_node_gpu_memory_bytes", "Memory of all GPUs of a node.", |n| {
            n.mem_mib as f64 * MIB
        }),
        (
            "roommate_node_gpu_memory_promised_bytes",
            "GPU memory that is promised to the pods of a node.",
            |n| n.promised_mib as f64 * MIB,
        ),
    ];
    for (name, help, figure) in each {
        let mut all = page.gauge(name, help);
        for node in nodes.iter().take(MOST_NODES) {
            all.add(&[("node", &node.node), ("model", &node.model)], figure(node));
        }
    }
    let omitted = nodes.len().saturating_sub(MOST_NODES);
    let help = "Nodes that have no samples here, because there are too many.";
    page.gauge("roommate_nodes_omitted", help).add(&[], omitted as f64);
}

/// What pods have of each of their GPUs.
fn gpus_of_pods(page: &mut Page, tenants: &[TenantFigures]) {
    let each: [Metric<TenantFigures>; 3] = [
        (
            "roommate_pod_gpu_share_ratio",
            "Promised part of a GPU; 0 = what others leave idle.",
            |t| t.share,
        ),
        ("roommate_pod_gpu_limit_ratio", "The most of a GPU that a pod may use.", |t| t.limit),
        ("roommate_pod_gpu_memory_promised_bytes", "Promised memory of a GPU; 0 = none.", |t| {
            f64::from(t.mem_mib) * MIB
        }),
    ];
    for (name, help, figure) in each {
        let mut all = page.gauge(name, help);
        for tenant in tenants.iter().take(MOST_PODS) {
            for gpu in &tenant.gpus {
                let gpu = gpu.to_string();
                let [namespace, pod, node] = labels(tenant);
                all.add(&[namespace, pod, node, ("gpu", &gpu)], figure(tenant));
            }
        }
    }
    let omitted = tenants.len().saturating_sub(MOST_PODS);
    let help = "Pods on GPUs that have no samples here, because there are too many.";
    page.gauge("roommate_pods_omitted", help).add(&[], omitted as f64);
}

/// How fast pods run, where that was measured or promised.
fn speeds_of_pods(page: &mut Page, tenants: &[TenantFigures]) {
    let each: [Metric<TenantFigures, Option<f64>>; 7] = [
        ("roommate_pod_suspended", "Whether a pod stands still, its memory on the host.", |t| {
            Some(f64::from(u8::from(t.suspended)))
        }),
        ("roommate_pod_step_seconds", "Seconds of a step of a pod, as measured.", |t| t.step_s),
        (
            "roommate_pod_slowdown_ratio",
            "How many times as long as alone a step of a pod takes.",
            |t| t.slowdown,
        ),
        (
            "roommate_pod_slowdown_limit_ratio",
            "How many times as long it may take, as promised.",
            |t| t.most_slowdown,
        ),
        (
            "roommate_pod_objective_seconds",
            "Objective for the 99th percentile of latency of a service.",
            |t| t.objective_s,
        ),
        (
            "roommate_pod_p99_latency_seconds",
            "The 99th percentile of latency of a service, as measured.",
            |t| t.p99_s,
        ),
        ("roommate_pod_requests_per_second", "Requests to a service, as measured.", |t| t.load_rps),
    ];
    for (name, help, figure) in each {
        let mut all = page.gauge(name, help);
        for tenant in tenants.iter().take(MOST_PODS) {
            if let Some(value) = figure(tenant) {
                all.add(&labels(tenant), value);
            }
        }
    }
}

fn labels(tenant: &TenantFigures) -> [(&str, &str); 3] {
    [("namespace", &tenant.namespace), ("pod", &tenant.pod), ("node", &tenant.node)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exposition::tests::checked;
    use crate::world::Settings;
    use roommate_core::time::Time;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;
    use std::time::Duration;

    fn pod(name: &str, annotations: &Value) -> Value {
        json!({
            "metadata": {"name": name, "namespace": "ml", "uid": name, "annotations": annotations,
                         "labels": {"roommate.dev/queue": "vision"}},
            "spec": {"schedulerName": "roommate", "containers": [
                {"name": "x", "resources": {"limits": {"roommate.dev/gpu": "1"}}}]},
            "status": {"phase": "Pending"},
        })
    }

    /// A world with a GPU, a service and a training job on it, and a pod that waits.
    fn world() -> World {
        let mut world = World::new(Settings::of("roommate")).unwrap();
        let node = json!({
            "metadata": {"name": "n1", "labels": {
                "roommate.dev/slots": "4", "nvidia.com/gpu.product": "NVIDIA-H200",
                "nvidia.com/gpu.memory": "143771"}},
            "status": {"allocatable": {"roommate.dev/gpu": "4", "cpu": "8", "memory": "64Gi"},
                       "conditions": [{"type": "Ready", "status": "True"}]},
        });
        world.node(serde_json::from_value(node).unwrap());
        let service = json!({
            "roommate.dev/class": "service", "roommate.dev/objective": "p99=25ms",
            "roommate.dev/gpu-share": "40", "roommate.dev/gpu-mem": "8000"});
        let train = json!({"roommate.dev/class": "guaranteed", "roommate.dev/gpu-share": "60"});
        let placed = |name: &str, annotations: &Value, knobs: Value, sample: Value| {
            let mut placed = pod(name, annotations);
            placed["spec"]["nodeName"] = "n1".into();
            placed["status"]["phase"] = "Running".into();
            let assignment = json!({"gpus": [0], "knobs": knobs, "term": 1, "decision": 1});
            let annotations = &mut placed["metadata"]["annotations"];
            annotations["roommate.dev/assignment"] = assignment.to_string().into();
            annotations["roommate.dev/measured"] = sample.to_string().into();
            placed
        };
        let mut waits = pod("waits", &json!({"roommate.dev/gpu-share": "100"}));
        waits["spec"]["nodeSelector"] = json!({"zone": "nowhere"});
        for pod in [
            placed(
                "serve",
                &service,
                json!({"sm_permille": 400, "mem_mib": 8000}),
                json!({"p99_us": 12_000, "load_rps": 80.0}),
            ),
            placed("train", &train, json!({"sm_permille": 600}), json!({"step_s": 0.25})),
            waits,
        ] {
            world.pod(serde_json::from_value(pod).unwrap());
        }
        // A part of the journal is begun a moment after the first node, and pods are told why they
        // wait a moment after that.
        for at in [1_000, 500_000, 1_000_000] {
            world.step(Time(at));
        }
        world
    }

    #[test]
    fn metrics_say_who_shares_and_who_waits() {
        let mut metrics = Metrics::new("roommate");
        metrics.scheduled.add(Duration::from_millis(3));
        let page = metrics.page(Some(&world()), 7);
        checked(&page);
        for line in [
            r#"roommate_schedule_attempts_total{result="scheduled",profile="roommate"} 1"#,
            r#"roommate_pending_pods{queue="unschedulable"} 1"#,
            r#"roommate_queue_pending_pods{queue="vision"} 1"#,
            r#"roommate_queue_placed_pods{queue="vision"} 2"#,
            r#"roommate_node_gpus_shared{node="n1",model="h200"} 1"#,
            r#"roommate_node_promised_gpus{node="n1",model="h200"} 1"#,
            r#"roommate_pod_gpu_share_ratio{namespace="ml",pod="serve",node="n1",gpu="0"} 0.4"#,
            r#"roommate_pod_objective_seconds{namespace="ml",pod="serve",node="n1"} 0.025"#,
            r#"roommate_pod_p99_latency_seconds{namespace="ml",pod="serve",node="n1"} 0.012"#,
            r#"roommate_pod_step_seconds{namespace="ml",pod="train",node="n1"} 0.25"#,
            r#"roommate_pod_slowdown_limit_ratio{namespace="ml",pod="train",node="n1"} 1.5"#,
        ] {
            assert!(page.lines().any(|l| l == line), "{line} in\n{page}");
        }
        let idle = Metrics::new("roommate").page(None, 0);
        assert!(idle.contains("roommate_leader 0"));
        assert_eq!(checked(&idle).len(), 2);
    }

    #[test]
    fn samples_are_bounded_and_what_is_left_out_is_counted() {
        let queues = (0..MOST_QUEUES + 3)
            .map(|n| (format!("q{n:04}"), QueueFigures { pending: 2, ..QueueFigures::default() }));
        let figures = Figures { queues: queues.collect(), ..Figures::default() };
        let mut page = Page::default();
        pending(&mut page, &figures);
        let text = page.text();
        checked(&text);
        assert_eq!(text.matches("roommate_queue_pending_pods{").count(), MOST_QUEUES + 1);
        assert!(text.contains("roommate_queue_pending_pods{queue=\"(others)\"} 6"), "{text}");
    }

    #[test]
    fn every_metric_of_the_dashboard_is_exported() {
        let mut metrics = Metrics::new("roommate");
        for all in [&mut metrics.scheduled, &mut metrics.unschedulable, &mut metrics.failed] {
            all.add(Duration::from_millis(3));
        }
        let exported = checked(&metrics.page(Some(&world()), 7));
        // Some have no sample here: without the length of a step alone, no slowdown is known.
        let described = metrics.page(Some(&world()), 7);
        let heads = described.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next());
        let exported: BTreeSet<String> =
            exported.into_iter().chain(heads.map(String::from)).collect();
        let dashboard =
            include_str!("../../../../packaging/helm/roommate/dashboards/roommate.json");
        let dashboard: Value = serde_json::from_str(dashboard).unwrap();
        let mut expressions = Vec::new();
        find_expressions(&dashboard, &mut expressions);
        assert!(expressions.len() >= 12, "{} expressions", expressions.len());
        for expression in expressions {
            let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let words = expression.split(|c: char| !is_part(c));
            let names: Vec<&str> = words.filter(|w| w.starts_with("roommate_")).collect();
            assert!(!names.is_empty(), "{expression}: no metric of ours");
            for name in names {
                assert!(exported.contains(name), "{name} is not exported: {expression}");
            }
        }
    }

    fn find_expressions<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    match value {
                        Value::String(text) if key == "expr" || key == "definition" => {
                            found.push(text);
                        }
                        other => find_expressions(other, found),
                    }
                }
            }
            Value::Array(all) => all.iter().for_each(|v| find_expressions(v, found)),
            _ => {}
        }
    }
}
