//! A policy that the test plays, in a thread, over a pair of sockets.

use super::*;
use roommate_core::cluster::Cluster;
use roommate_core::engine::Engine;
use roommate_core::event::{Action, Event};
use roommate_core::idx::ProfileIdx;
use roommate_core::interference;
use roommate_core::profile::Profile;
use roommate_core::state::Costs;
use serde_json::{Value, json};
use std::thread::JoinHandle;

/// The policy's side: says these lines and returns the answers to them.
fn policy(socket: UnixStream, says: Vec<Value>) -> JoinHandle<Vec<Value>> {
    std::thread::spawn(move || {
        let mut from = BufReader::new(socket.try_clone().unwrap()).lines();
        let mut hear = || serde_json::from_str(&from.next().unwrap().unwrap()).unwrap();
        let mut heard: Vec<Value> = vec![hear(), hear()];
        let (last, first) = says.split_last().unwrap();
        for said in first {
            writeln!(&socket, "{said}").unwrap();
            heard.push(hear());
        }
        let text = last.as_str().map_or(last.to_string(), Into::into);
        writeln!(&socket, "{text}").unwrap();
        heard
    })
}

/// Two jobs, of one and of three GPUs, are submitted on two nodes of two GPUs: what the engine does
/// when the policy says these lines, what the policy hears, and why it failed.
fn decide(says: Vec<Value>) -> (Vec<Action>, Vec<Value>, Option<String>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let names = Names { jobs: vec!["a".into(), "b".into()], profiles: vec!["resnet".into()] };
    let (external, failure) = External::over(ours, names).unwrap();
    let peer = policy(theirs, says);
    let cluster: Cluster = "2x2".parse().unwrap();
    let belief = interference::belief(None);
    let mut engine = Engine::new(&cluster, Costs::default(), Box::new(external), belief, 1);
    engine.add_profile(Profile::of_step(1.0));
    let jobs = [1, 3].map(|gpus| engine.add_job(Spec::training(gpus, 10.0, ProfileIdx(0))));
    let actions = engine.step(Time::ZERO, &jobs.map(Event::Submitted)).actions.to_vec();
    let why = failure.take().map(|error| format!("{error:#}"));
    (actions, peer.join().unwrap(), why)
}

fn decided() -> Value {
    json!({"decided": {}})
}

#[test]
fn edits_of_the_policy_become_actions() {
    let place = json!({"place": {"job": 1, "gpus": [0, 1, 2]}});
    let wake = json!({"wake": {"at_us": 5_000_000}});
    let find = json!({"find": {"job": 0, "rule": "consolidated"}});
    let (actions, heard, why) = decide(vec![find, place, wake, decided()]);
    assert_eq!(why, None);
    assert!(matches!(&actions[..], [Action::Start(JobIdx(1), p)] if p.gpus.len() == 3));
    assert_eq!(heard[0]["begin"]["nodes"][1]["first_gpu"], 2);
    let asked = &heard[1]["asked"];
    assert_eq!((&asked["new"][1]["name"], &asked["new"][1]["gpus"]), (&json!("b"), &json!(3)));
    assert_eq!(asked["new"][0]["profile_name"], "resnet");
    assert_eq!(asked["idle"], json!([0, 1, 2, 3]));
    assert_eq!(heard[2..], [json!({"found": [0]}), json!({"done": {}}), json!({"done": {}})]);
}

#[test]
fn an_illegal_edit_is_refused_and_changes_nothing() {
    for (edit, why) in [
        (json!({"place": {"job": 0, "gpus": [0, 1]}}), "fewer or more GPUs than the job can use"),
        (json!({"place": {"job": 0, "gpus": [9]}}), "the GPUs are not ascending"),
        (json!({"place": {"job": 1, "gpus": [2, 1, 0]}}), "the GPUs are not ascending"),
        (json!({"place": {"job": 7, "gpus": [0]}}), "there is no such job"),
        (json!({"find": {"job": 7, "rule": "count"}}), "there is no such job"),
        (json!({"release": {"job": 0}}), "the job holds no GPUs"),
        (json!({"tune": {"job": 0, "knobs": {"batch": 3}}}), "the job holds no GPUs"),
        (json!({"wake": {"at_us": 0}}), "a wake-up must be in the future"),
        (
            json!({"place": {"job": 0, "gpus": [0], "knobs": {"sm_permille": 2000}}}),
            "a knob is outside its range",
        ),
    ] {
        let (actions, heard, failed) = decide(vec![edit, decided()]);
        assert!(heard[2]["refused"]["why"].as_str().unwrap().starts_with(why), "{:?}", heard[2]);
        assert_eq!((actions, failed), (vec![], None));
    }
}

#[test]
fn a_policy_that_fails_has_decided_nothing() {
    let place = json!({"place": {"job": 0, "gpus": [0]}});
    for (last, what) in [
        (json!({"failed": {"why": "KeyError: 3"}}), "the policy failed: KeyError: 3"),
        (json!("{\"jump\": {}}"), "invalid message from the policy: \"{\\\"jump\\\": {}}\""),
        (json!("{\"place\""), "invalid message from the policy"),
        (json!(""), "invalid message from the policy"),
    ] {
        let (actions, _, why) = decide(vec![place.clone(), last]);
        assert_eq!(actions, vec![]);
        assert!(why.as_ref().is_some_and(|w| w.starts_with(what)), "{why:?}");
    }
}
