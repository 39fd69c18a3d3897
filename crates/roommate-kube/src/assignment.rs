//! The decision of the scheduler for a pod. It travels in an annotation that is written in one
//! write with the binding, so that there is no pod on a node whose GPUs are not known, and a
//! scheduler that starts anew reads from the pods where everything is.

use crate::names;
use crate::objects::Pod;
use roommate_core::knobs::{Knobs, is_default};
use serde::{Deserialize, Serialize};

/// Where and how a pod runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Assignment {
    /// Numbers of its GPUs on its node, ascending.
    pub gpus: Vec<u16>,
    /// How it runs on each of them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub knobs: Knobs,
    /// Whether it stands still, its memory on the host.
    #[serde(default, skip_serializing_if = "is_default")]
    pub suspended: bool,
    /// The term of the scheduler that decided it: agents obey no older one.
    pub term: u64,
    /// Number of the decision in that term.
    pub decision: u64,
    /// The whole gang, where the pod is part of one: where each of its pods goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang: Option<Gang>,
}

/// A gang as it was placed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gang {
    /// The places of its pods: node and GPUs there.
    pub places: Vec<(String, Vec<u16>)>,
}

/// What a node's agent has put into force for a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Applied {
    /// The term of the assignment.
    pub term: u64,
    /// Its decision.
    pub decision: u64,
}

impl Assignment {
    /// The assignment of a pod, if it has one that can be read.
    pub fn of(pod: &Pod) -> Option<Self> {
        let read: Self = serde_json::from_str(pod.annotation(names::ASSIGNMENT)?).ok()?;
        let sane = read.knobs.are_sane() && read.gpus.is_sorted_by(|a, b| a < b);
        (sane && !read.gpus.is_empty()).then_some(read)
    }

    /// As an annotation.
    pub fn text(&self) -> String {
        serde_json::to_string(self).expect("an assignment can always be written")
    }

    /// What its agent answers once it is in force.
    pub fn applied(&self) -> Applied {
        Applied { term: self.term, decision: self.decision }
    }

    /// Whether it gives the pod the same as another, whoever decided it and when.
    pub fn gives_the_same(&self, other: &Self) -> bool {
        self.gpus == other.gpus && self.knobs == other.knobs && self.suspended == other.suspended
    }
}

impl Applied {
    /// What the agent says of a pod.
    pub fn of(pod: &Pod) -> Option<Self> {
        serde_json::from_str(pod.annotation(names::APPLIED)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_assignment_is_short_and_reads_back() {
        let plain = Assignment {
            gpus: vec![3],
            knobs: Knobs::WHOLE,
            suspended: false,
            term: 2,
            decision: 17,
            gang: None,
        };
        assert_eq!(plain.text(), r#"{"gpus":[3],"term":2,"decision":17}"#);
        let gang = Some(Gang { places: vec![("a".into(), vec![3]), ("b".into(), vec![0, 1])] });
        let knobs = Knobs { sm_permille: 500, mem_mib: 900, ..Knobs::WHOLE };
        let full = Assignment { knobs, suspended: true, gang, ..plain };
        let mut pod = Pod::default();
        assert_eq!(Assignment::of(&pod), None);
        pod.metadata.annotations = Some([(names::ASSIGNMENT.into(), full.text())].into());
        assert_eq!(Assignment::of(&pod), Some(full));
    }

    #[test]
    fn what_no_scheduler_wrote_is_no_assignment() {
        for text in [
            "",
            "{}",
            r#"{"gpus":[],"term":1,"decision":1}"#,
            r#"{"gpus":[1,0],"term":1,"decision":1}"#,
            r#"{"gpus":[0],"term":1,"decision":1,"knobs":{"sm_permille":2000}}"#,
            r#"{"gpus":[0],"term":1,"decision":1,"more":1}"#,
        ] {
            let mut pod = Pod::default();
            pod.metadata.annotations = Some([(names::ASSIGNMENT.into(), text.into())].into());
            assert_eq!(Assignment::of(&pod), None, "{text}");
        }
    }
}
