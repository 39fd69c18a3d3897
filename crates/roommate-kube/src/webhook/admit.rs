//! What the webhook makes of a pod: a pure function. A pod that was admitted once is admitted again
//! without a change.

use crate::names;
use crate::webhook::spelling::{self, Wish, annotation, asked, list, map, name_of};
use json_patch::Patch;
use serde_json::{Value, json};

/// The scheduler of pods that name none.
const USUAL_SCHEDULER: &str = "default-scheduler";

/// What becomes of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Admitted {
    /// What changes.
    pub patch: Patch,
    /// What its user should know.
    pub warnings: Vec<String>,
}

impl Admitted {
    /// Changes the pod for which it was made.
    pub fn apply(&self, pod: &mut Value) {
        json_patch::patch(pod, &self.patch).expect("a patch fits the pod for which it was made");
    }
}

/// Translates what a pod asks for into our names, and gives it to this scheduler; or says why it is
/// refused.
pub fn admit(pod: &Value, scheduler: &str) -> Result<Admitted, String> {
    let chosen = pod.pointer("/spec/schedulerName").and_then(Value::as_str).unwrap_or_default();
    let ours = ["", USUAL_SCHEDULER, scheduler].contains(&chosen);
    let ignore = pod.pointer("/metadata/labels").and_then(|l| l.get(names::WEBHOOK)?.as_str());
    let node = pod.pointer("/spec/nodeName").and_then(Value::as_str).unwrap_or_default();
    if !ours || !node.is_empty() || ignore == Some("ignore") {
        return Ok(Admitted::default());
    }
    let wish = spelling::read(pod)?;
    let containers = list(pod, "/spec/containers");
    if wish.is_none() && !containers.iter().any(|c| asked(c, names::RESOURCE).is_some()) {
        return Ok(Admitted::default());
    }
    refuse_bypass(pod)?;
    let mut after = pod.clone();
    if let Some(wish) = &wish {
        translate(&mut after, wish);
    }
    after["spec"]["schedulerName"] = json!(scheduler);
    let warnings = wish.map(|w| w.warnings).unwrap_or_default();
    Ok(Admitted { patch: json_patch::diff(pod, &after), warnings })
}

fn translate(pod: &mut Value, wish: &Wish) {
    let container = pod.pointer(&format!("/spec/containers/{}", wish.container));
    let name = container.map(name_of).unwrap_or_default().to_string();
    if let Some(container) = pod.pointer_mut(&format!("/spec/containers/{}", wish.container)) {
        for kind in ["requests", "limits"] {
            let resources = map(container, "resources").is_some();
            let of = resources.then(|| map(&mut container["resources"], kind)).flatten();
            let Some(of) = of else { continue };
            wish.written.iter().for_each(|(written, _)| drop(of.remove(written)));
            of.insert(names::RESOURCE.into(), json!(wish.gpus.to_string()));
        }
    }
    let metadata = map(pod, "metadata").is_some();
    let annotations = metadata.then(|| map(&mut pod["metadata"], "annotations")).flatten();
    let Some(annotations) = annotations else { return };
    wish.written.iter().for_each(|(written, _)| drop(annotations.remove(written)));
    let written: Vec<String> = wish.written.iter().map(|(n, v)| format!("{n}={v}")).collect();
    let note = format!("{}: {} (container {name})", wish.of, written.join(", "));
    annotations.insert(names::TRANSLATED.into(), json!(note));
    for (name, value) in [(names::SHARE, &wish.share), (names::MEMORY, &wish.memory)] {
        if let Some(value) = value {
            annotations.entry(name).or_insert_with(|| json!(value));
        }
    }
}

/// Variables by which a container would leave its part of a GPU. Refused and not removed: a program
/// that silently runs with others than its user wrote is worse than one that does not start.
fn refuse_bypass(pod: &Value) -> Result<(), String> {
    let lists = ["/spec/containers", "/spec/initContainers"];
    for container in lists.iter().flat_map(|pointer| list(pod, pointer)) {
        let variables = container.get("env").and_then(Value::as_array).into_iter().flatten();
        let mut named = variables.filter_map(|v| v.get("name")?.as_str());
        let bypasses = |name: &&str| {
            name.starts_with("CUDA_MPS_")
                || ["NVIDIA_VISIBLE_DEVICES", "CUDA_DISABLE_CONTROL"].contains(name)
        };
        if let Some(variable) = named.find(bypasses) {
            return Err(format!(
                "container {:?} sets {variable}, which would override its part of the GPU: remove \
                 the variable, or ask for whole GPUs (nvidia.com/gpu)",
                name_of(container)
            ));
        }
    }
    Ok(())
}

/// Whether the webhook translated the pod; what its user wrote.
pub fn translated(pod: &Value) -> Option<&str> {
    annotation(pod, names::TRANSLATED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pod(annotations: Value, containers: Value) -> Value {
        let mut pod = json!({"metadata": {"name": "a"},
                             "spec": {"schedulerName": "default-scheduler"}});
        pod["metadata"]["annotations"] = annotations;
        pod["spec"]["containers"] = containers;
        pod
    }

    fn one(limits: Value) -> Value {
        let mut container = json!({"name": "main"});
        container["resources"]["limits"] = limits;
        pod(json!({}), json!([container]))
    }

    fn admitted(pod: &Value) -> Value {
        let mut after = pod.clone();
        admit(pod, "roommate").unwrap().apply(&mut after);
        after
    }

    fn refused(pod: &Value) -> String {
        admit(pod, "roommate").unwrap_err()
    }

    fn ours(pod: &Value) -> [Option<&str>; 4] {
        let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
        [
            limits[names::RESOURCE].as_str(),
            annotation(pod, names::SHARE),
            annotation(pod, names::MEMORY),
            pod["spec"]["schedulerName"].as_str(),
        ]
    }

    #[test]
    fn spellings_of_others_become_ours() {
        let hami =
            json!({"nvidia.com/gpu": 2, "nvidia.com/gpumem": "3k", "nvidia.com/gpucores": 30});
        let after = admitted(&one(hami));
        assert_eq!(ours(&after), [Some("2"), Some("30"), Some("3000"), Some("roommate")]);
        let resources =
            json!({"limits": {names::RESOURCE: "2"}, "requests": {names::RESOURCE: "2"}});
        assert_eq!(after["spec"]["containers"][0]["resources"], resources);
        assert_eq!(
            translated(&after),
            Some(
                "HAMi: nvidia.com/gpu=2, nvidia.com/gpumem=3k, nvidia.com/gpucores=30 (container main)"
            )
        );
        let volcano =
            json!({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-cores": "50", "cpu": "2"});
        let after = admitted(&one(volcano));
        assert_eq!(ours(&after), [Some("1"), Some("50"), None, Some("roommate")]);
        assert_eq!(after["spec"]["containers"][0]["resources"]["limits"]["cpu"], "2");
        let kai = pod(
            json!({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2",
                   "gpu-fraction-container-name": "work", "other": "x"}),
            json!([{"name": "side"}, {"name": "work"}]),
        );
        let after = admitted(&kai);
        let work = &after["spec"]["containers"][1]["resources"]["limits"];
        assert_eq!(
            (&work[names::RESOURCE], &after["spec"]["containers"][0]),
            (&json!("2"), &json!({"name": "side"}))
        );
        assert_eq!(
            after["metadata"]["annotations"],
            json!({
            "other": "x", names::SHARE: "50",
            names::TRANSLATED: "KAI: gpu-fraction=0.5, gpu-fraction-num-devices=2, \
                                gpu-fraction-container-name=work (container work)"})
        );
        let bare = json!({"metadata": {"annotations": {"gpu-memory": "2000"}},
                          "spec": {"containers": [{"name": "x"}]}});
        assert_eq!(ours(&admitted(&bare)), [Some("1"), None, Some("2000"), Some("roommate")]);
    }

    #[test]
    fn a_percentage_of_memory_becomes_a_share_with_a_warning() {
        let pod = one(json!({"nvidia.com/gpumem-percentage": "40"}));
        assert_eq!(ours(&admitted(&pod))[..3], [Some("1"), Some("40"), None]);
        let warnings = admit(&pod, "roommate").unwrap().warnings;
        assert!(warnings[0].starts_with("nvidia.com/gpumem-percentage: became"), "{warnings:?}");
        assert!(warnings[0].chars().count() <= 120, "kubectl shows 120 characters: {warnings:?}");
        let both = one(json!({"nvidia.com/gpumem-percentage": "40", "nvidia.com/gpucores": "30"}));
        assert_eq!(ours(&admitted(&both))[1], Some("30"));
        let all = one(json!({"nvidia.com/gpumem": "1000"}));
        assert_eq!(admit(&all, "roommate").unwrap().warnings, Vec::<String>::new());
    }

    #[test]
    fn our_own_pods_get_the_scheduler_and_nothing_else() {
        let own = one(json!({"roommate.dev/gpu": "1"}));
        let after = admitted(&own);
        assert_eq!(after["spec"]["schedulerName"], "roommate");
        assert_eq!(admit(&own, "roommate").unwrap().patch.0.len(), 1);
        // A scheduler of another name.
        let mut named = own;
        named["spec"]["schedulerName"] = json!("blue");
        assert_eq!(admit(&named, "blue").unwrap().patch.0, []);
        assert_eq!(admit(&named, "roommate").unwrap().patch.0, []);
    }

    #[test]
    fn pods_of_others_are_left_alone() {
        let mut pods = vec![
            one(json!({"nvidia.com/gpu": "2"})),
            one(json!({"cpu": "1"})),
            pod(json!({}), json!([{"name": "x"}])),
            json!({}),
        ];
        let asks = one(json!({"nvidia.com/gpumem": "900"}));
        for (pointer, name, value) in [
            ("/spec", "schedulerName", json!("hami-scheduler")),
            ("/spec", "nodeName", json!("n")),
            ("/metadata", "labels", json!({names::WEBHOOK: "ignore"})),
        ] {
            let mut pod = asks.clone();
            pod.pointer_mut(pointer).unwrap()[name] = value;
            pods.push(pod);
        }
        for pod in pods {
            assert_eq!(admit(&pod, "roommate"), Ok(Admitted::default()), "{pod}");
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_in_words() {
        let two = json!([{"name": "a", "resources": {"limits": {"nvidia.com/gpumem": "1"}}},
                         {"name": "b", "resources": {"limits": {"nvidia.com/gpumem": "1"}}}]);
        let kai = |name: &str, value: &str| {
            pod(json!({"gpu-fraction": "0.5", name: value}), json!([{"name": "x"}]))
        };
        let mut whole = kai("other", "x");
        whole["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/gpu": "1"}});
        for (pod, why) in [
            (
                one(json!({"nvidia.com/gpumem": "8Gi"})),
                "nvidia.com/gpumem: expected a whole number from 0 to 4000000, found \"8Gi\"",
            ),
            (
                one(json!({"nvidia.com/gpucores": "130"})),
                "nvidia.com/gpucores: expected a whole number from 0 to 100, found \"130\"",
            ),
            (
                one(json!({"nvidia.com/gpumem": "1", "nvidia.com/gpumem-percentage": "5"})),
                "it asks for nvidia.com/gpumem and for nvidia.com/gpumem-percentage: use one",
            ),
            (
                one(json!({"nvidia.com/gpumem": "1", "volcano.sh/vgpu-cores": "5"})),
                "it asks for nvidia.com/gpu... and for volcano.sh",
            ),
            (
                one(json!({"nvidia.com/gpumem": "1", "roommate.dev/gpu": "1"})),
                "it asks for roommate.dev/gpu and for nvidia.com/gpumem",
            ),
            (pod(json!({}), two), "containers \"a\" and \"b\" both ask for parts of GPUs"),
            (kai("gpu-memory", "900"), "it asks for gpu-fraction and for gpu-memory"),
            (
                kai("gpu-fraction", "1.5"),
                "annotation gpu-fraction: expected a number from 0.01 to 1, found \"1.5\"",
            ),
            (
                kai("gpu-fraction-num-devices", "none"),
                "annotation gpu-fraction-num-devices: expected a whole number",
            ),
            (
                kai("gpu-fraction-container-name", "y"),
                "annotation gpu-fraction-container-name: the pod has no container \"y\"",
            ),
            (
                kai("roommate.dev/gpu-share", "20"),
                "annotation roommate.dev/gpu-share says \"20\" and gpu-fraction asks for 50",
            ),
            (whole, "it asks for nvidia.com/gpu and for gpu-fraction: use one of them"),
        ] {
            let found = refused(&pod);
            assert!(found.starts_with(why), "{found}");
        }
        let mut init = one(json!({}));
        init["spec"]["initContainers"] =
            json!([{"name": "i", "resources": {"limits": {"volcano.sh/vgpu-number": "1"}}}]);
        assert!(refused(&init).starts_with("init container \"i\" asks for parts of GPUs"));
    }

    #[test]
    fn variables_that_override_a_share_are_refused() {
        for name in
            ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "NVIDIA_VISIBLE_DEVICES", "CUDA_DISABLE_CONTROL"]
        {
            for asks in ["roommate.dev/gpu", "nvidia.com/gpumem"] {
                let mut pod = one(json!({asks: "1"}));
                pod["spec"]["containers"][0]["env"] =
                    json!([{"name": "A", "value": "b"}, {"name": name, "value": "all"}]);
                assert!(refused(&pod).starts_with(&format!("container \"main\" sets {name}")));
            }
            let mut other = one(json!({"nvidia.com/gpu": "1"}));
            other["spec"]["containers"][0]["env"] = json!([{"name": name, "value": "all"}]);
            assert_eq!(admit(&other, "roommate"), Ok(Admitted::default()));
        }
    }

    /// Amounts as users write them, right and wrong.
    fn an_amount() -> impl Strategy<Value = Value> {
        prop_oneof![
            (0..200u32).prop_map(|n| json!(n.to_string())),
            (0..200u32).prop_map(|n| json!(n)),
            prop::sample::select(&["1k", "0.5", "-1", "2Gi", "x", ""][..]).prop_map(|t| json!(t)),
        ]
    }

    const RESOURCES: [&str; 10] = [
        "cpu",
        "nvidia.com/gpu",
        "nvidia.com/gpumem",
        "nvidia.com/gpumem-percentage",
        "nvidia.com/gpucores",
        "volcano.sh/vgpu-number",
        "volcano.sh/vgpu-memory",
        "volcano.sh/vgpu-cores",
        "roommate.dev/gpu",
        "example.com/other",
    ];
    const ANNOTATIONS: [&str; 8] = [
        "gpu-fraction",
        "gpu-memory",
        "gpu-fraction-num-devices",
        "gpu-fraction-container-name",
        names::SHARE,
        names::MEMORY,
        "other",
        names::TRANSLATED,
    ];

    fn a_container() -> impl Strategy<Value = Value> {
        let amounts =
            || prop::collection::btree_map(prop::sample::select(&RESOURCES[..]), an_amount(), 0..3);
        let env = prop::collection::vec(prop::sample::select(&["PATH", "CUDA_MPS_X"][..]), 0..2);
        (prop::option::of(amounts()), prop::option::of(amounts()), env, 0..3u32).prop_map(
            |(limits, requests, env, n)| {
                let mut container = json!({"name": format!("c{n}"), "image": "any"});
                for (kind, amounts) in [("limits", limits), ("requests", requests)] {
                    if let Some(amounts) = amounts {
                        container["resources"][kind] = json!(amounts);
                    }
                }
                if !env.is_empty() {
                    container["env"] = env.iter().map(|name| json!({"name": name})).collect();
                }
                container
            },
        )
    }

    fn a_pod() -> impl Strategy<Value = Value> {
        let texts = prop::sample::select(&["0.5", "1", "c0", "c1", "30", "no"][..]);
        let texts = texts.prop_map(|t| json!(t));
        let annotations =
            prop::collection::btree_map(prop::sample::select(&ANNOTATIONS[..]), texts, 0..3);
        let scheduler = prop::sample::select(&["", "default-scheduler", "roommate", "other"][..]);
        let label = prop::sample::select(&["", "ignore"][..]);
        let containers = || prop::collection::vec(a_container(), 0..3);
        (prop::option::of(annotations), scheduler, label, containers(), containers()).prop_map(
            |(annotations, scheduler, label, containers, inits)| {
                let mut pod = json!({"metadata": {"name": "p", "labels": {names::WEBHOOK: label}},
                                     "spec": {"containers": containers, "initContainers": inits}});
                if let Some(annotations) = annotations {
                    pod["metadata"]["annotations"] = json!(annotations);
                }
                if !scheduler.is_empty() {
                    pod["spec"]["schedulerName"] = json!(scheduler);
                }
                pod
            },
        )
    }

    /// Whether the text of a pod has any of the names that the webhook is about.
    fn asks_for_parts(pod: &Value) -> bool {
        let in_containers = |name: &str| {
            list(pod, "/spec/containers")
                .iter()
                .chain(list(pod, "/spec/initContainers"))
                .any(|c| asked(c, name).is_some())
        };
        let resources = RESOURCES
            .iter()
            .filter(|r| !["cpu", "nvidia.com/gpu", "example.com/other"].contains(*r));
        resources.copied().any(in_containers)
            || ["gpu-fraction", "gpu-memory"].iter().any(|name| annotation(pod, name).is_some())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn an_admitted_pod_is_admitted_again_without_a_change(pod in a_pod()) {
            if admit(&pod, "roommate").is_ok() {
                let after = admitted(&pod);
                prop_assert_eq!(admit(&after, "roommate"), Ok(Admitted::default()), "{}", after);
            }
        }

        #[test]
        fn pods_without_any_spelling_are_untouched(pod in a_pod()) {
            let ignored = pod["metadata"]["labels"][names::WEBHOOK] == "ignore";
            let others = pod["spec"]["schedulerName"] == "other";
            if !asks_for_parts(&pod) || ignored || others {
                prop_assert_eq!(admit(&pod, "roommate"), Ok(Admitted::default()));
            }
        }

        #[test]
        fn a_translated_pod_asks_in_our_names_alone(pod in a_pod()) {
            let before = translated(&pod).map(String::from);
            if admit(&pod, "roommate").is_ok() {
                let after = admitted(&pod);
                if translated(&after).map(String::from) != before {
                    let foreign = RESOURCES.iter().filter(|r| r.starts_with("nvidia") || r.starts_with("volcano"));
                    let left = foreign.filter(|r| list(&after, "/spec/containers").iter().any(|c| asked(c, r).is_some()));
                    prop_assert_eq!(left.count(), 0, "{}", after);
                    prop_assert!(list(&after, "/spec/containers").iter().filter(|c| asked(c, names::RESOURCE).is_some()).count() == 1);
                    prop_assert_eq!(&after["spec"]["schedulerName"], "roommate");
                }
            }
        }
    }
}
