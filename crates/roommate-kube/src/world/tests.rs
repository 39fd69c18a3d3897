use crate::fuzz::{self, Plan};
use crate::names;
use crate::objects::{Node, Pod};
use crate::world::{Settings, World, Write};
use roommate_core::policy::POLICIES;
use roommate_core::time::Time;
use serde_json::{Value, json};

/// Operations of a try in the tests; `roommate kube fuzz` does a million.
const OPERATIONS: u64 = 4_000;

/// Seeds with which something was wrong before, by policy.
const ONCE_WRONG: [(&str, u64); 7] = [
    ("srtf", 22),
    ("roommate", 48),
    ("roommate", 6),
    ("roommate", 58),
    ("tiresias", 122),
    ("tiresias", 147),
    ("fifo-backfill", 82),
];

#[test]
fn nothing_is_given_away_twice_and_nothing_is_leaked() {
    let mut wrong = Vec::new();
    for entry in POLICIES.iter().filter(|p| !p.is_ablation()) {
        let before = ONCE_WRONG.iter().filter(|(policy, _)| *policy == entry.name);
        for seed in [1, 2].into_iter().chain(before.map(|(_, seed)| *seed)) {
            let plan = Plan { operations: OPERATIONS, seed, policy: entry.name.into() };
            let caught = std::panic::catch_unwind(|| fuzz::run(&plan, &mut |_| {}));
            let said = match caught {
                Ok(Ok(out)) if out.first.is_none() => continue,
                Ok(Ok(out)) => format!("{:?}", out.first),
                Ok(Err(e)) => e,
                Err(_) => "panicked".into(),
            };
            wrong.push(format!("{} seed {seed}: {said}", entry.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn node(name: &str, spec: &Value) -> Node {
    let node = json!({
        "metadata": {"name": name}, "spec": spec,
        "status": {"allocatable": {names::RESOURCE: "4", "cpu": "8", "memory": "16Gi"},
                   "conditions": [{"type": "Ready", "status": "True"}]},
    });
    let mut node: Node = serde_json::from_value(node).unwrap();
    node.metadata.labels = Some([(names::SLOTS.into(), "4".into())].into());
    node
}

fn pod(name: &str, annotations: &Value, spec: &Value) -> Pod {
    let mut all = json!({
        "metadata": {"name": name, "namespace": "ml", "uid": name, "annotations": annotations,
                     "ownerReferences": [{"controller": true, "uid": "job", "name": "job",
                                          "kind": "Job", "apiVersion": "batch/v1"}]},
        "spec": {"schedulerName": names::SCHEDULER, "containers": [{"name": "x", "resources": {
            "requests": {"cpu": "1"}, "limits": {names::RESOURCE: "1"}}}]},
    });
    for (field, value) in spec.as_object().into_iter().flatten() {
        all["spec"][field] = value.clone();
    }
    serde_json::from_value(all).unwrap()
}

/// Where pods are bound, by their names.
fn bound(writes: &[Write]) -> Vec<(&str, &str)> {
    let mut all = Vec::new();
    for write in writes {
        if let Write::Bind { pod, node, .. } = write {
            all.push((pod.name.as_str(), node.as_str()));
        }
    }
    all
}

#[test]
fn the_next_pod_does_not_go_where_the_last_one_was_drained() {
    let mut world = World::new(Settings::of("fifo")).unwrap();
    world.node(node("a", &json!({"unschedulable": true})));
    world.node(node("b", &json!({})));
    let there = json!({names::ASSIGNMENT: r#"{"gpus":[0],"term":1,"decision":1}"#});
    let mut first = pod("first", &there, &json!({"nodeName": "a"}));
    first.status = serde_json::from_value(json!({"phase": "Running"})).unwrap();
    world.pod(first);
    for s in 0..3 {
        assert_eq!(world.step(Time::from_secs(f64::from(s))), [], "it runs where it is");
    }
    world.pod_gone("first");
    world.pod(pod("second", &json!({}), &json!({})));
    assert_eq!(bound(&world.step(Time::from_secs(4.0))), [("second", "b")]);
}

#[test]
fn pods_of_a_gang_have_room_for_the_largest() {
    let mut world = World::new(Settings::of("fifo")).unwrap();
    world.node(node("a", &json!({})));
    world.node(node("b", &json!({})));
    let gang = json!({names::GROUP_SIZE: "2"});
    let large = json!({"containers": [{"name": "x", "resources": {
        "requests": {"cpu": "5"}, "limits": {names::RESOURCE: "1"}}}]});
    world.pod(pod("small", &gang, &json!({})));
    world.pod(pod("large", &gang, &large));
    world.step(Time::ZERO);
    let writes = world.step(Time::from_secs(1.0));
    let nodes: Vec<&str> = bound(&writes).iter().map(|(_, node)| *node).collect();
    assert!(nodes.len() == 2 && nodes[0] != nodes[1], "{writes:?}");
}
