//! The custom resources, as people write them. Their definitions are made from these types:
//! `roommate kube crds` prints them, `kubectl explain` shows the comments of the fields.
//!
//! [`queue`] grants GPUs to teams, [`profile`] says what is known of kinds of work, [`service`] and
//! [`job`] are what a pod needs to be served or trained, in a few lines.

#![expect(unreachable_pub, reason = "the schemas are made from copies of the types")]
#![expect(clippy::duplicated_attributes, reason = "two columns may be of one type")]

pub mod job;
pub mod profile;
pub mod queue;
pub mod service;
mod template;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::CustomResourceExt as _;
use schemars::{Schema, SchemaGenerator, json_schema};

/// The definitions of all custom resources.
pub fn all() -> [CustomResourceDefinition; 4] {
    [
        queue::Queue::crd(),
        profile::GpuProfile::crd(),
        service::GpuService::crd(),
        job::GpuJob::crd(),
    ]
}

/// The same as YAML, one document each.
pub fn yaml() -> String {
    let document = |crd| {
        let text = yaml_serde::to_string(&crd).expect("a definition can always be written");
        format!("---\n{text}")
    };
    all().map(document).concat()
}

/// Conditions, of which there is one of each type.
fn conditions(_: &mut SchemaGenerator) -> Schema {
    let text = |description: &str| json_schema!({"type": "string", "description": description});
    json_schema!({
        "type": "array",
        "description": "What is true of it now, and why.",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
            "properties": {
                "type": text("What it is about, such as Available."),
                "status": {"type": "string", "enum": ["True", "False", "Unknown"],
                           "description": "Whether it is true."},
                "reason": text("Why, in one word for programs."),
                "message": text("Why, in words for people."),
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0,
                                       "description": "The generation that was looked at."},
                "lastTransitionTime": {"type": "string", "format": "date-time",
                                       "description": "When its status changed last."},
            },
        },
    })
}

/// A condition; it keeps the time of the one before if the status is the same.
pub(crate) fn condition(
    before: &[Condition],
    kind: &str,
    is: bool,
    (reason, message): (&str, String),
    generation: Option<i64>,
) -> Condition {
    let status = if is { "True" } else { "False" };
    let same = before.iter().find(|c| c.type_ == kind && c.status == status);
    let since = same.map_or_else(|| Time(now()), |c| c.last_transition_time.clone());
    Condition {
        type_: kind.into(),
        status: status.into(),
        reason: reason.into(),
        message,
        observed_generation: generation,
        last_transition_time: since,
    }
}

/// Now, in whole seconds: that is how the API server keeps it.
fn now() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_keeps_its_time_until_its_status_changes() {
        let first = condition(&[], "Ready", false, ("Waits", "it waits".into()), Some(1));
        let mut old = first.clone();
        old.last_transition_time = Time(Timestamp::from_second(17).unwrap());
        let before = [old.clone()];
        let same = condition(&before, "Ready", false, ("Starts", "it starts".into()), Some(2));
        assert_eq!(same.last_transition_time, old.last_transition_time);
        assert_eq!((same.reason.as_str(), same.observed_generation), ("Starts", Some(2)));
        let other = condition(&before, "Ready", true, ("Runs", "it runs".into()), Some(2));
        assert_ne!(other.last_transition_time, old.last_transition_time);
    }

    #[test]
    fn the_chart_has_the_definitions_that_the_program_prints() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let file = root.join("packaging/helm/roommate/crds/roommate.dev.yaml");
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, yaml()).unwrap();
        }
        let chart = std::fs::read_to_string(&file).unwrap_or_default();
        assert_eq!(chart, yaml(), "UPDATE_EXPECT=1 cargo test -p roommate-kube crd");
    }

    #[test]
    fn every_field_is_explained_and_every_rule_has_a_message() {
        fn look(at: &str, schema: &serde_json::Value, wrong: &mut Vec<String>) {
            if schema["description"].as_str().is_none_or(str::is_empty) {
                wrong.push(format!("{at}: no description"));
            }
            for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
                if rule["message"].as_str().is_none_or(str::is_empty) {
                    wrong.push(format!("{at}: no message for {}", rule["rule"]));
                }
            }
            for (name, field) in schema["properties"].as_object().into_iter().flatten() {
                look(&format!("{at}.{name}"), field, wrong);
            }
            if schema["items"]["properties"].is_object() {
                for (name, field) in schema["items"]["properties"].as_object().into_iter().flatten()
                {
                    look(&format!("{at}[].{name}"), field, wrong);
                }
            }
        }
        let mut wrong = Vec::new();
        for crd in all() {
            let value = serde_json::to_value(&crd).unwrap();
            let version = &value["spec"]["versions"][0];
            assert_eq!(version["name"], "v1alpha1");
            assert!(version["subresources"]["status"].is_object());
            assert!(version["additionalPrinterColumns"].as_array().is_some_and(|c| c.len() > 2));
            assert_eq!(value["spec"]["names"]["categories"], serde_json::json!(["roommate"]));
            let kind = value["spec"]["names"]["kind"].as_str().unwrap();
            look(kind, &version["schema"]["openAPIV3Schema"], &mut wrong);
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
