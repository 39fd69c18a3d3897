//! Questions about small clusters, asked of the journal of the world that schedules them.

use super::*;
use crate::names;
use crate::objects::Pod;
use crate::world::{Answer, Settings, World, Write};
use roommate_core::reason::Source;
use serde_json::{Value, json};

/// A world whose writes are done at once.
struct Cluster {
    world: World,
    now: Time,
}

impl Cluster {
    fn new(policy: &str, nodes: &[&str]) -> Self {
        let mut one = Self { world: World::new(Settings::of(policy)).unwrap(), now: Time::ZERO };
        for name in nodes {
            let node = json!({
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name,
                             "roommate.dev/slots": "4"}},
                "status": {"allocatable": {"roommate.dev/gpu": "8", "cpu": "64", "memory": "512Gi"},
                           "conditions": [{"type": "Ready", "status": "True"}]},
            });
            one.world.node(serde_json::from_value(node).unwrap());
        }
        one.run(1.0);
        one
    }

    fn run(&mut self, s: f64) {
        self.now += Span::from_secs(s);
        for write in self.world.step(self.now) {
            self.world.answer(&write, Answer::Done);
            if let Write::Bind { pod, node, assignment } = &write {
                let mut bound = pod_of(&pod.name, &json!({names::ASSIGNMENT: assignment}));
                bound.spec.node_name = Some(node.clone());
                bound.status = serde_json::from_value(json!({"phase": "Running"})).unwrap();
                self.world.pod(bound);
            }
        }
        self.world.step(self.now);
    }

    fn add(&mut self, name: &str, annotations: &Value) {
        self.world.pod(pod_of(name, annotations));
        self.run(1.0);
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot::of(&self.world.snapshot(self.now)).unwrap()
    }

    fn ask(&self, annotations: &Value, allows: &dyn Fn(&str) -> bool) -> Verdict {
        let request = Request::of(&pod_of("asked", annotations), names::RESOURCE).unwrap();
        let jobs = vec![("ml/asked".to_string(), 1)];
        ask(self.snapshot(), &Question { request: &request, jobs, allows }).unwrap().remove(0)
    }
}

fn pod_of(name: &str, annotations: &Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "ml", "uid": name, "annotations": annotations},
        "spec": {"schedulerName": "roommate", "containers": [
            {"name": "x", "resources": {"limits": {"roommate.dev/gpu": "1"}}}]},
    }))
    .unwrap()
}

fn anywhere(_: &str) -> bool {
    true
}

#[test]
fn a_job_starts_where_the_scheduler_would_start_it() {
    let mut cluster = Cluster::new("fifo", &["a", "b"]);
    cluster.add("first", &json!({}));
    let verdict = cluster.ask(&json!({}), &anywhere);
    assert_eq!((verdict.outcome, verdict.starts_in_s), (Outcome::Starts, Some(0.0)));
    assert_eq!((verdict.why, verdict.others_waiting), (None, 0));
    cluster.add("asked", &json!({}));
    let seen = cluster.snapshot();
    let job = seen.engine.state().jobs.indices().next_back().unwrap();
    assert_eq!(seen.job(job), "ml/asked");
    let at: Vec<_> = seen.engine.state().job(job).gpus.iter().map(|g| seen.place(*g)).collect();
    let at: Vec<_> = at.into_iter().map(|(node, n)| (seen.node(node).to_string(), n)).collect();
    let foreseen = verdict.places.iter();
    let foreseen: Vec<_> =
        foreseen.flat_map(|p| p.gpus.iter().map(|n| (p.node.clone(), *n))).collect();
    assert_eq!(at, foreseen);
}

#[test]
fn a_class_that_is_torn_by_a_constraint_is_split() {
    let mut cluster = Cluster::new("fifo", &["a", "b", "c"]);
    cluster.add("first", &json!({}));
    cluster.add("second", &json!({}));
    let seen = cluster.snapshot();
    for node in seen.engine.state().nodes.indices() {
        let wanted = seen.node(node);
        let verdict = cluster.ask(&json!({}), &|name| name == wanted);
        let on = verdict.places.first().map(|p| p.node.as_str());
        match seen.engine.state().node(node).idle {
            0 => assert_eq!((verdict.outcome, on), (Outcome::Waits, None)),
            _ => assert_eq!((verdict.outcome, on), (Outcome::Starts, Some(wanted))),
        }
    }
    let nowhere = cluster.ask(&json!({}), &|_| false);
    assert_eq!(nowhere.outcome, Outcome::Never);
    assert!(nowhere.why.unwrap().starts_with("can never run"));
}

#[test]
fn the_start_of_a_job_that_waits_follows_from_declared_lengths() {
    let length = |s: u32| json!({names::SECONDS: s.to_string()});
    let mut cluster = Cluster::new("fifo", &["a"]);
    cluster.add("first", &length(100));
    cluster.add("second", &length(50));
    cluster.add("third", &length(10));
    cluster.run(20.0);
    // The third begins when the second ends, and ends before the first.
    let verdict = cluster.ask(&json!({}), &anywhere);
    assert_eq!((verdict.outcome, verdict.others_waiting), (Outcome::Waits, 1));
    let starts_in_s = verdict.starts_in_s.unwrap();
    assert!((30.0..=42.0).contains(&starts_in_s), "{starts_in_s}");
    assert!(verdict.why.is_some());
}

#[test]
fn what_nobody_knows_is_not_guessed() {
    let mut cluster = Cluster::new("fifo", &["a"]);
    cluster.add("first", &json!({}));
    cluster.add("second", &json!({}));
    let verdict = cluster.ask(&json!({}), &anywhere);
    assert_eq!((verdict.outcome, verdict.starts_in_s), (Outcome::Waits, None));
    assert_eq!(without_end(&cluster.snapshot()), ["ml/first", "ml/second"]);
}

#[test]
fn roommates_are_named_with_what_it_costs_them() {
    let mut cluster = Cluster::new("roommate", &["a"]);
    cluster.add("first", &json!({names::SHARE: "50"}));
    cluster.add("second", &json!({names::SHARE: "50"}));
    let verdict = cluster.ask(&json!({names::SHARE: "30"}), &anywhere);
    for roommate in &verdict.roommates {
        assert!(roommate.after.times > roommate.before.unwrap().times, "{roommate:?}");
        assert_eq!(roommate.after.source, Source::Thumb, "nothing was measured");
    }
    assert_eq!(verdict.outcome == Outcome::Starts, !verdict.roommates.is_empty(), "{verdict:?}");
}

#[test]
fn other_journals_are_refused_in_words() {
    let refused = |text: &str| Snapshot::of(text.as_bytes()).err().unwrap().to_string();
    assert_eq!(refused("{}"), "line 1: this is not a Roommate journal: it has no head");
    let journal = Cluster::new("fifo", &["a"]).world.journal();
    let journal = String::from_utf8(journal).unwrap();
    let machine = journal.replacen("kubernetes", "machine", 1);
    assert_eq!(refused(&machine), "it is not a snapshot of a scheduler on Kubernetes");
    let names = journal.replacen(r#""nodes":["a"]"#, r#""nodes":["a","b"]"#, 1);
    assert_eq!(refused(&names), "line 1: another number of names than of nodes");
}
