//! What a pod asks of Roommate, in its users' spelling; or why it cannot be placed.

use crate::constraint::Constraint;
use crate::crd::profile::Batch;
use crate::names;
use crate::objects::{Pod, PodTerms, Volume};
use roommate_core::idx::{ProfileIdx, TeamIdx};
use roommate_core::job::{Class, GUARANTEED_SLOWDOWN, Retries, Slo, Spec};
use roommate_core::knobs::Knobs;
use roommate_core::number::Number;
use roommate_core::profile::{Profile, Serving};
use roommate_core::time::Span;

/// What a pod asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Its GPUs, all on one node.
    pub gpus: u16,
    /// What it asks on each of them.
    pub knobs: Knobs,
    /// What it is guaranteed.
    pub class: Class,
    /// Promised: how much longer roommates may make its steps.
    pub max_slowdown: Option<Number>,
    /// The latency that it has to keep.
    pub slo: Option<Slo>,
    /// Seconds that it takes alone, as declared.
    pub seconds: Option<Number>,
    /// Batch sizes that its user allows.
    pub batch: Option<Batch>,
    /// Requests in the largest batch of a service.
    pub max_batch: Option<u32>,
    /// Requests a second that are expected of a service.
    pub rate: Option<f64>,
    /// The kind of work.
    pub profile: String,
    /// Its queue.
    pub queue: String,
    /// On which nodes it may run.
    pub constraint: Constraint,
}

/// The queue of pods that name none.
pub const USUAL_QUEUE: &str = "default";

impl Request {
    /// What a pod asks for, or why it is not placed.
    pub fn of(pod: &Pod, resource: &str) -> Result<Self, String> {
        refuse_unknown(pod)?;
        let gpus = gpus_of(pod, resource)?;
        let class = class_of(pod)?;
        let written = number(pod, names::MAX_SLOWDOWN, 1.0, 1000.0)?;
        let usual =
            (pod.annotation(names::CLASS) == Some("guaranteed")).then_some(GUARANTEED_SLOWDOWN);
        // Nobody may slow a pod down to which a whole GPU is promised.
        let whole = number(pod, names::SHARE, 1.0, 100.0)? == Some(100.0);
        let usual = if whole { Some(1.0) } else { usual };
        let seconds = number(pod, names::SECONDS, 0.0, 1e10)?;
        Ok(Self {
            gpus,
            knobs: knobs_of(pod, gpus)?,
            class,
            max_slowdown: written.or(usual).map(Number::of),
            slo: objective_of(pod, class)?,
            seconds: seconds.map(Number::of),
            batch: batch_of(pod, class)?,
            max_batch: number(pod, names::MAX_BATCH, 1.0, 65_536.0)?.map(|n| n as u32),
            rate: number(pod, names::EXPECTED_RATE, 0.0, 1e9)?,
            profile: profile_of(pod),
            queue: pod.label(names::QUEUE).unwrap_or(USUAL_QUEUE).into(),
            constraint: Constraint::of(pod),
        })
    }

    /// Whether a pod that asks for this and one that asks for the other can be of one gang, which
    /// has one assignment; they may differ in CPU and memory of the host.
    pub fn fits_a_gang_with(&self, other: &Self) -> bool {
        let on_gpus = |asked: &Self| Knobs { cpu_milli: 0, host_mib: 0, ..asked.knobs };
        (self.gpus, on_gpus(self), self.class, &self.queue, &self.constraint)
            == (other.gpus, on_gpus(other), other.class, &other.queue, &other.constraint)
    }

    /// The kind of work as the engine knows it: pods with batch sizes of their own are a kind of
    /// their own.
    pub fn kind(&self) -> String {
        match (self.batch, self.max_batch) {
            (Some(batch), _) => format!("{} {batch}", self.profile),
            (None, Some(most)) => format!("{} ..{most}", self.profile),
            (None, None) => self.profile.clone(),
        }
    }

    /// What the engine may know of that kind, with what is known of the profile that it names.
    pub fn expected(&self, profile: Option<&Profile>) -> Profile {
        let unknown = || Profile { step_unknown: true, ..Profile::of_step(1.0) };
        let mut known = profile.cloned().unwrap_or_else(unknown);
        if let Some(batch) = &self.batch {
            known.training = Some(batch.training());
        }
        // The length of a step is that of a batch of the size that is given with it.
        if let (Some(most), None, Class::Service) = (self.max_batch, known.serving, self.class) {
            known.serving = Some(Serving {
                batch: most,
                timeout: Span::ZERO,
                warm_up: Span::ZERO,
                base_mib: 0.0,
                item_mib: 0.0,
            });
        }
        known
    }

    /// The job of so many pods that ask for this.
    pub fn spec(&self, pods: u16, profile: ProfileIdx, team: TeamIdx, gpu_models: u32) -> Spec {
        let gpus = self.gpus.saturating_mul(pods);
        Spec {
            knobs: self.knobs,
            class: self.class,
            max_slowdown: self.max_slowdown,
            slo: self.slo,
            declared_s: self.seconds,
            // Without a length of its step its work is the seconds that were declared.
            work: self.seconds,
            team,
            gpu_models,
            gpus_per_task: self.gpus,
            // Whoever made the pod makes another one if it fails.
            retries: Retries::from(0),
            ..Spec::training(gpus, 0.0, profile)
        }
    }
}

/// Whether the pod has something that would have to be obeyed and is not understood.
fn refuse_unknown(pod: &Pod) -> Result<(), String> {
    let spec = &pod.spec;
    let affinity = spec.affinity.as_ref();
    let required = |terms: Option<&PodTerms>| {
        let all =
            terms.and_then(|t| t.required_during_scheduling_ignored_during_execution.as_ref());
        all.is_some_and(|terms| !terms.is_empty())
    };
    let refused = |what: &str, instead: &str| {
        Err(format!("{what} is not implemented by this scheduler: {instead}"))
    };
    if required(affinity.and_then(|a| a.pod_affinity.as_ref())) {
        return refused("required pod affinity", "make it a preference, or use node affinity");
    }
    if required(affinity.and_then(|a| a.pod_anti_affinity.as_ref())) {
        return refused("required pod anti-affinity", "make it a preference");
    }
    let strict =
        |s: &crate::objects::Spread| s.when_unsatisfiable.as_deref() != Some("ScheduleAnyway");
    if spec.topology_spread_constraints.iter().flatten().any(strict) {
        return refused("topology spread with DoNotSchedule", "use ScheduleAnyway");
    }
    let mut containers = spec.containers.iter().chain(&spec.init_containers);
    let port = |c: &crate::objects::Container| {
        c.ports.iter().flatten().any(|p| p.host_port.is_some_and(|port| port > 0))
    };
    if containers.any(port) {
        return refused("a host port", "use a Service");
    }
    let claimed = |v: &Volume| v.persistent_volume_claim.is_some() || v.ephemeral.is_some();
    if spec.volumes.iter().flatten().any(claimed) {
        return refused(
            "a persistent volume claim",
            "its volume may be on some nodes only; use a hostPath, NFS or CSI inline volume",
        );
    }
    if spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
        return refused("a resource claim", &format!("ask for {}", names::RESOURCE));
    }
    Ok(())
}

/// Its GPUs: one container has them all.
fn gpus_of(pod: &Pod, resource: &str) -> Result<u16, String> {
    let asked = |c: &crate::objects::Container| {
        let resources = c.resources.as_ref()?;
        let limit = resources.limits.as_ref().and_then(|l| l.get(resource));
        crate::objects::amount(limit.or_else(|| resources.requests.as_ref()?.get(resource))?)
    };
    let all: Vec<f64> = pod.spec.containers.iter().filter_map(asked).filter(|n| *n > 0.0).collect();
    match all[..] {
        [] => Err(format!("it asks for no {resource}; set resources.limits of a container")),
        [gpus] if gpus <= 64.0 && gpus.fract() == 0.0 => Ok(gpus as u16),
        [gpus] => Err(format!("{resource}: expected 1 to 64, found {gpus}")),
        _ => Err(format!("several containers ask for {resource}; give all to one of them")),
    }
}

fn class_of(pod: &Pod) -> Result<Class, String> {
    match pod.annotation(names::CLASS) {
        None | Some("guaranteed") => Ok(Class::Guaranteed),
        Some("best-effort") => Ok(Class::BestEffort),
        Some("service") => Ok(Class::Service),
        Some(other) => Err(format!(
            "{}: expected guaranteed, best-effort or service, found {other:?}",
            names::CLASS
        )),
    }
}

/// A number in an annotation.
fn number(pod: &Pod, name: &str, least: f64, most: f64) -> Result<Option<f64>, String> {
    let Some(text) = pod.annotation(name) else { return Ok(None) };
    let value = text.trim().parse::<f64>().ok().filter(|v| (least..=most).contains(v));
    let expected = || format!("{name}: expected a number from {least} to {most}, found {text:?}");
    value.map(Some).ok_or_else(expected)
}

fn knobs_of(pod: &Pod, gpus: u16) -> Result<Knobs, String> {
    let share = number(pod, names::SHARE, 1.0, 100.0)?;
    let memory = number(pod, names::MEMORY, 1.0, 4e6)?;
    let (cpu, host) = pod.room();
    let each = |all: u64| u32::try_from(all.div_ceil(u64::from(gpus))).unwrap_or(u32::MAX / 128);
    Ok(Knobs {
        // What is not said is for the policy to choose, as for a job file.
        sm_permille: share.map_or(Knobs::SM_ALL, |percent| (percent * 10.0).round() as u16),
        mem_mib: memory.map_or(0, |mib| mib as u32),
        cpu_milli: each(cpu),
        host_mib: each(host),
        ..Knobs::WHOLE
    })
}

fn batch_of(pod: &Pod, class: Class) -> Result<Option<Batch>, String> {
    let Some(text) = pod.annotation(names::BATCH) else { return Ok(None) };
    if class == Class::Service {
        return Err(format!("{}: of a service, {} is meant", names::BATCH, names::MAX_BATCH));
    }
    text.parse().map(Some).map_err(|why| format!("{}: {why}", names::BATCH))
}

/// `p99=25ms`; also seconds, and microseconds as `us`.
fn objective_of(pod: &Pod, class: Class) -> Result<Option<Slo>, String> {
    let Some(text) = pod.annotation(names::OBJECTIVE) else { return Ok(None) };
    if class != Class::Service {
        let name = names::OBJECTIVE;
        return Err(format!("{name}: only for {}: service", names::CLASS));
    }
    objective(text).map(Some).map_err(|why| format!("{}: {why}", names::OBJECTIVE))
}

/// An objective as people write it, `p99=25ms`.
pub fn objective(text: &str) -> Result<Slo, String> {
    let time = |text: &str| {
        let units = [("us", 1.0), ("µs", 1.0), ("ms", 1e3), ("s", 1e6)];
        let of =
            |(unit, us): &(&str, f64)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * us);
        units.iter().find_map(of).filter(|us| (1.0..=3.6e9).contains(us))
    };
    let p99_us = text.trim().strip_prefix("p99=").and_then(time);
    let expected = || format!("expected p99=25ms, found {text:?}");
    p99_us.map(|us| Slo { p99_us: us as u32 }).ok_or_else(expected)
}

/// The kind of work: as its user says, else its owner without the part that is made up for each
/// run, else its own name.
fn profile_of(pod: &Pod) -> String {
    if let Some(name) = pod.annotation(names::PROFILE) {
        return name.into();
    }
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    let owner = owners.iter().find(|o| o.controller == Some(true)).map(|o| o.name.as_str());
    let name = owner.unwrap_or_else(|| pod.name());
    format!(
        "{}/{}",
        pod.namespace(),
        name.trim_end_matches(|c: char| c == '-' || c.is_ascii_digit())
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(annotations: &Value, spec: &Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "train-7", "namespace": "ml", "annotations": annotations},
            "spec": spec,
        }))
        .unwrap()
    }

    fn with(annotations: &Value) -> Result<Request, String> {
        let spec = json!({"containers": [{"name": "x", "resources": {
            "limits": {"roommate.dev/gpu": "2", "cpu": "3", "memory": "1Gi"}}}]});
        Request::of(&pod(annotations, &spec), names::RESOURCE)
    }

    fn refused(spec: Value) -> String {
        let mut spec = spec;
        if spec["containers"].is_null() {
            spec["containers"] =
                json!([{"name": "x", "resources": {"limits": {"roommate.dev/gpu": "1"}}}]);
        }
        Request::of(&pod(&json!({}), &spec), names::RESOURCE).unwrap_err()
    }

    #[test]
    fn annotations_say_how_a_pod_shares() {
        let plain = with(&json!({})).unwrap();
        assert_eq!((plain.gpus, plain.class), (2, Class::Guaranteed));
        assert_eq!((plain.knobs.cpu_milli, plain.knobs.host_mib), (1500, 512));
        assert_eq!((plain.profile.as_str(), plain.queue.as_str()), ("ml/train", "default"));
        assert_eq!((plain.max_slowdown, plain.slo), (None, None));
        let full = with(&json!({
            "roommate.dev/gpu-share": "30", "roommate.dev/gpu-mem": "8000",
            "roommate.dev/class": "service", "roommate.dev/objective": "p99=25ms",
            "roommate.dev/profile": "bert", "roommate.dev/expected-seconds": "60",
        }))
        .unwrap();
        assert_eq!((full.knobs.sm_permille, full.knobs.mem_mib), (300, 8000));
        assert_eq!((full.slo, full.profile.as_str()), (Some(Slo { p99_us: 25_000 }), "bert"));
        assert_eq!((full.kind().as_str(), full.expected(None).serving), ("bert", None));
        let guaranteed = with(&json!({"roommate.dev/class": "guaranteed"})).unwrap();
        assert_eq!(guaranteed.max_slowdown, Some(Number::of(1.5)));
    }

    #[test]
    fn batch_sizes_become_part_of_the_kind_of_work() {
        let tuned = with(&json!({"roommate.dev/batch": "8..16..64"})).unwrap();
        assert_eq!(tuned.kind(), "ml/train 8..16..64");
        let known = Profile::of_step(0.5);
        let training = tuned.expected(Some(&known)).training.unwrap();
        assert_eq!((training.batch_min, training.batch, training.batch_max), (8, 16, 64));
        assert_eq!(tuned.expected(Some(&known)).step_s, known.step_s);
        let service = json!({
            "roommate.dev/class": "service", "roommate.dev/max-batch": "4",
            "roommate.dev/expected-rate": "30",
        });
        let service = with(&service).unwrap();
        assert_eq!((service.kind().as_str(), service.rate), ("ml/train ..4", Some(30.0)));
        assert_eq!(service.expected(None).serving.map(|s| s.batch), Some(4));
    }

    #[test]
    fn wrong_annotations_are_named() {
        for (annotation, value, expect) in [
            ("gpu-share", "130", "roommate.dev/gpu-share: expected a number from 1 to 100, found"),
            ("gpu-mem", "8Gi", "roommate.dev/gpu-mem: expected a number from 1 to 4000000, found"),
            ("class", "gold", "roommate.dev/class: expected guaranteed, best-effort or service"),
            (
                "objective",
                "p99=1ms",
                "roommate.dev/objective: only for roommate.dev/class: service",
            ),
            ("batch", "64", "roommate.dev/batch: expected the least, its own and the most, such"),
            ("max-batch", "0", "roommate.dev/max-batch: expected a number from 1 to 65536"),
            ("max-slowdown", "0.5", "roommate.dev/max-slowdown: expected a number from 1 to 1000"),
        ] {
            let found = with(&json!({format!("roommate.dev/{annotation}"): value})).unwrap_err();
            assert!(found.starts_with(expect), "{found}");
        }
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let terms =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "h"}]});
        for (spec, expect) in [
            (json!({"affinity": {"podAffinity": terms}}), "required pod affinity"),
            (json!({"affinity": {"podAntiAffinity": terms}}), "required pod anti-affinity"),
            (json!({"topologySpreadConstraints": [{"maxSkew": 1}]}), "topology spread"),
            (json!({"volumes": [{"persistentVolumeClaim": {"claimName": "c"}}]}), "a persistent"),
            (json!({"resourceClaims": [{"name": "c"}]}), "a resource claim"),
            (json!({"containers": [{"name": "x", "ports": [{"hostPort": 80}]}]}), "a host port"),
            (json!({"containers": [{"name": "x"}]}), "it asks for no roommate.dev/gpu"),
        ] {
            let found = refused(spec);
            assert!(found.starts_with(expect), "{found}");
        }
        let soft = json!({"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]});
        let spec = json!({
            "affinity": {"podAntiAffinity": soft},
            "topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}],
            "containers": [{"name": "x", "resources": {"limits": {"roommate.dev/gpu": "1"}}}],
        });
        assert!(Request::of(&pod(&json!({}), &spec), names::RESOURCE).is_ok());
    }
}
