//! Documents of Kubernetes by example, and properties over generated pods.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes its texts so")]

use super::super::{Format, ReadOptions, Trace, TraceError, native, read as read_trace};
use super::*;
use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::json;
use std::io::Write;

fn read_text(text: &str, skip_bad_rows: bool) -> Result<Trace, TraceError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    read_trace(file.path(), &ReadOptions { skip_bad_rows, ..ReadOptions::default() })
}

/// The jobs in the project's own format, and the remarks.
fn check(text: &str, expected: &Expect) {
    let text = match read_text(text, false) {
        Ok(trace) => {
            assert_eq!(trace.format, Format::Kube);
            let mut text = Vec::new();
            native::write_csv(&mut text, &trace.jobs).unwrap();
            let told = trace.remarks.iter().map(|(remark, n)| remark.told(*n) + "\n");
            String::from_utf8(text).unwrap() + &told.collect::<String>()
        }
        Err(error) => format!("{:?}: {}\n", error.line, error.problem),
    };
    expected.assert_eq(&text);
}

/// A time of the first of November 2026, in minutes after ten.
fn at(minute: u64) -> String {
    format!("2026-11-01T{:02}:{:02}:00Z", 10 + minute / 60, minute % 60)
}

/// A pod that ran from minute `start` to `end`, if it did.
fn pod(name: &str, gpus: u32, start: Option<u64>, end: Option<u64>) -> Value {
    let phase = match (start, end) {
        (None, _) => "Pending",
        (Some(_), None) => "Running",
        (Some(_), Some(_)) => "Succeeded",
    };
    let state = match end {
        Some(end) => json!({"terminated": {"exitCode": 0, "finishedAt": at(end)}}),
        None => json!({"running": {}}),
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "ml", "uid": name, "creationTimestamp": at(0)},
        "spec": {"containers": [{"name": "x", "resources": {
            "limits": {"nvidia.com/gpu": gpus.to_string(), "cpu": "16"},
            "requests": {"cpu": "8500m"}}}]},
        "status": {"phase": phase, "startTime": start.map(at),
            "containerStatuses": start.map(|_| vec![json!({"state": state})]).unwrap_or_default()},
    })
}

fn with(mut pod: Value, pointer: &str, value: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    pod.pointer_mut(parent).unwrap()[key] = value;
    pod
}

fn list(items: &[Value]) -> String {
    let list = json!({"apiVersion": "v1", "items": items, "kind": "List", "metadata": {}});
    serde_json::to_string_pretty(&list).unwrap()
}

#[test]
fn pods_of_a_list_are_jobs() {
    let model = json!({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"});
    let labels = json!({"kueue.x-k8s.io/queue-name": "vision"});
    let one = with(pod("train-7", 4, Some(5), Some(65)), "/spec/nodeSelector", model);
    let scheduled =
        json!([{"type": "PodScheduled", "status": "True", "lastTransitionTime": at(4)}]);
    check(
        &list(&[
            with(one, "/metadata/labels", labels),
            with(pod("still", 1, Some(10), None), "/status/conditions", scheduled),
            pod("waits", 1, None, None),
            pod("cpu", 0, Some(1), Some(2)),
        ]),
        &expect![[r#"
            id,submit_s,gpus,duration_s,queue_s,attempts,cpu_milli,model,team,status,kinds
            ml/still,0,1,3660,240,1,8500,still,ml,,
            ml/train-7,0,4,3600,300,1,2125,train,vision,passed,nvidia-h100-80gb-hbm3
            left out 1 job without a GPU
            left out 1 job that never started
            took 1 job as ended that still ran when the file was written
        "#]],
    );
}

#[test]
fn gangs_attempts_and_tasks_are_told_apart() {
    let owned = |name: &str, kind: &str, start: u64, end: u64| {
        let owner =
            json!([{"kind": kind, "name": name.rsplit_once('-').unwrap().0, "controller": true}]);
        with(pod(name, 2, Some(start), Some(end)), "/metadata/ownerReferences", owner)
    };
    let indexed = |name: &str, index: &str, start: u64, end: u64| {
        let labels = json!({"batch.kubernetes.io/job-completion-index": index});
        with(owned(name, "Job", start, end), "/metadata/labels", labels)
    };
    let grouped = |name: &str, start: u64, end: u64| {
        let labels = json!({"scheduling.x-k8s.io/pod-group": "gang"});
        with(pod(name, 8, Some(start), Some(end)), "/metadata/labels", labels)
    };
    check(
        &list(&[
            // A gang, that ran again after ten minutes.
            grouped("a", 1, 11),
            grouped("b", 2, 11),
            grouped("a-again", 21, 31),
            grouped("b-again", 21, 41),
            owned("torch-0", "PyTorchJob", 5, 15),
            owned("torch-1", "PyTorchJob", 5, 15),
            indexed("sweep-x1", "0", 5, 8),
            indexed("sweep-x2", "0", 8, 18),
            indexed("sweep-x3", "1", 5, 9),
            owned("web-9", "ReplicaSet", 1, 50),
        ]),
        &expect![[r#"
            id,submit_s,gpus,duration_s,queue_s,attempts,cpu_milli,model,team,status
            ml/gang,0,16,1800,60,2,1062,gang,ml,passed
            ml/sweep/0,0,2,780,300,2,4250,sweep,ml,passed
            ml/sweep/1,0,2,240,300,1,4250,sweep,ml,passed
            ml/torch,0,4,600,300,1,4250,torch,ml,passed
            left out 1 pod of servers (Deployments and the like)
        "#]],
    );
}

#[test]
fn a_watch_keeps_the_last_state_of_each_pod() {
    let event = |kind: &str, object: Value| json!({"type": kind, "object": object}).to_string();
    let deleted = with(pod("p", 2, Some(3), None), "/metadata/deletionTimestamp", json!(at(20)));
    let lines = [
        event("ADDED", pod("p", 2, None, None)),
        event("MODIFIED", pod("p", 2, Some(3), None)),
        event("ADDED", pod("q", 1, Some(4), Some(9))),
        event("DELETED", deleted),
        event(
            "BOOKMARK",
            json!({"kind": "Pod", "metadata": {"name": "", "resourceVersion": "9"}, "spec": {"containers": []}}),
        ),
    ];
    check(
        &lines.join("\n"),
        &expect![[r#"
            id,submit_s,gpus,duration_s,queue_s,attempts,cpu_milli,model,team,status
            ml/p,0,2,1020,180,1,4250,p,ml,killed
            ml/q,0,1,300,240,1,8500,q,ml,passed
            left out 1 other object (neither pods nor events of pods)
        "#]],
    );
}

#[test]
fn events_and_audits_fill_in_times() {
    let about = json!({"kind": "Pod", "namespace": "ml", "name": "p", "uid": "p"});
    let event = |reason: &str, minute: u64| {
        json!({"apiVersion": "v1", "kind": "Event", "reason": reason, "involvedObject": about,
            "firstTimestamp": at(minute)})
    };
    let new = with(pod("p", 2, None, None), "/status", json!({"phase": "Running"}));
    let audit = json!({"kind": "Event", "apiVersion": "audit.k8s.io/v1", "verb": "create",
        "objectRef": {"resource": "pods", "namespace": "ml", "name": "q"},
        "requestReceivedTimestamp": at(0), "responseObject": pod("q", 1, Some(2), None)});
    let gone = json!({"kind": "Event", "apiVersion": "audit.k8s.io/v1", "verb": "delete",
        "objectRef": {"resource": "pods", "namespace": "ml", "name": "q"},
        "requestReceivedTimestamp": "2026-11-01T10:30:00.123456Z"});
    let mut unknown = event("Scheduled", 1);
    unknown["involvedObject"]["name"] = json!("nobody");
    let text = [
        list(&[new, event("Scheduled", 6), event("Pulled", 7), event("Killing", 36), unknown]),
        audit.to_string(),
        gone.to_string(),
    ];
    check(
        &text.join("\n"),
        &expect![[r#"
            id,submit_s,gpus,duration_s,queue_s,attempts,cpu_milli,model,team,status
            ml/p,0,2,1800,360,1,4250,p,ml,killed
            ml/q,0,1,1680,120,1,8500,q,ml,killed
            left out 1 other object (neither pods nor events of pods)
            left out 1 event of pods that the file does not have
        "#]],
    );
}

#[test]
fn parts_of_gpus_are_counted() {
    let mig = json!({"limits": {"nvidia.com/mig-1g.10gb": "1"}});
    let hami = json!({"limits": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4000}});
    let kai = json!({"gpu-fraction": "0.5"});
    check(
        &list(&[
            with(pod("mig", 0, Some(1), Some(2)), "/spec/containers/0/resources", mig),
            with(pod("hami", 1, Some(1), Some(2)), "/spec/containers/0/resources", hami),
            with(pod("kai", 0, Some(1), Some(2)), "/metadata/annotations", kai),
            json!({"kind": "Node", "metadata": {"name": "n"}}),
        ]),
        &expect![[r#"
            id,submit_s,gpus,duration_s
            left out 3 jobs on a part of a GPU (MIG, MPS, shard)
            left out 1 other object (neither pods nor events of pods)
        "#]],
    );
}

#[test]
fn errors_name_the_object() {
    let bad = with(pod("p", 1, Some(1), Some(2)), "/metadata/creationTimestamp", json!("noon"));
    check(
        &list(std::slice::from_ref(&bad)),
        &expect![[r#"
            None: broken job: pod ml/p: expected a time like 2020-04-01 12:30:00 (1970 to 2069), found "noon"
        "#]],
    );
    let trace = read_text(&list(&[bad, pod("q", 1, Some(1), Some(2))]), true).unwrap();
    assert_eq!((trace.jobs.len(), trace.dropped), (1, 1));
    let whole = list(&[pod("q", 1, Some(1), Some(2))]);
    check(
        &whole[..whole.len() - 20],
        &expect![[r#"
            Some(45): broken job: the file ends inside of it
        "#]],
    );
    check(
        &whole.replace("\"phase\":", "\"phase\""),
        &expect![[r#"
            Some(40): broken JSON: expected `:`
        "#]],
    );
}

proptest! {
    #[test]
    fn pods_alone_are_jobs_of_their_own(
        pods in prop::collection::vec((0u32..9, 0u64..400, prop::option::of(0u64..400)), 0..12)
    ) {
        let made: Vec<Value> = pods.iter().enumerate().map(|(i, (gpus, start, length))| {
            pod(&format!("p{i}"), *gpus, Some(*start), length.map(|length| start + length))
        }).collect();
        let trace = read_text(&list(&made), false).unwrap();
        let latest = pods.iter().map(|(_, start, length)| start + length.unwrap_or(0)).max();
        let with_gpus = pods.iter().filter(|(gpus, ..)| *gpus > 0);
        prop_assert_eq!(trace.jobs.len(), with_gpus.clone().count());
        for (i, (gpus, start, length)) in pods.iter().enumerate().filter(|(_, p)| p.0 > 0) {
            let id = format!("ml/p{i}");
            let job = trace.jobs.iter().find(|job| job.id == id).unwrap();
            let minutes = length.unwrap_or(latest.unwrap_or(0) - start);
            prop_assert_eq!((job.gpus, job.duration_s), (*gpus, (minutes * 60) as f64));
            prop_assert_eq!(job.queue_s, Some((start * 60) as f64));
        }
        let mut csv = Vec::new();
        native::write_csv(&mut csv, &trace.jobs).unwrap();
        if !trace.jobs.is_empty() {
            let back = read_text(&String::from_utf8(csv).unwrap(), false).unwrap();
            prop_assert_eq!(back.jobs, trace.jobs);
        }
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "[a-z0-9{}\\[\\]\":, \n]{0,120}") {
        for start in ["{\"apiVersion\":", "{\"kind\":\"Pod\",", "{\"items\":[{\"kind\":"] {
            let _ = read_text(&format!("{start}{text}"), true);
        }
    }
}
