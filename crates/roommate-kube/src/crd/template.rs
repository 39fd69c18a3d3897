//! Pods of a resource: from an image and a command, or from a whole template, with what Roommate
//! has to know of them.

use crate::names;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A variable of the container's environment.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Variable {
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Its value.
    #[serde(default)]
    pub value: String,
}

/// The schema of a pod template: the API server checks it when pods are made of it.
pub(super) fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "nullable": true,
        "x-kubernetes-preserve-unknown-fields": true,
        "description": "The pods, as in a Deployment or Job: metadata and spec. The container that \
            asks for GPUs, or else the first, gets them. Give this, or image and command.",
    })
}

/// What pods are made of.
pub(super) struct Source<'a> {
    pub(super) template: Option<&'a Value>,
    pub(super) image: Option<&'a str>,
    pub(super) command: &'a [String],
    pub(super) args: &'a [String],
    pub(super) env: &'a [Variable],
}

/// What Roommate has to know of the pods.
#[derive(Default)]
pub(super) struct Marks {
    /// GPUs of each pod.
    pub(super) gpus: u16,
    pub(super) annotations: Vec<(&'static str, Option<String>)>,
    pub(super) labels: Vec<(&'static str, Option<String>)>,
    /// Variables of the container with the GPUs, unless it has its own of that name.
    pub(super) env: Vec<(&'static str, String)>,
    /// The port of the container with the GPUs.
    pub(super) port: Option<u16>,
}

impl Source<'_> {
    /// The template of the pods.
    pub(super) fn pods(&self, marks: &Marks, scheduler: &str) -> Result<Value, String> {
        let mut pods = match (self.template, self.image) {
            (Some(template), None) => template.clone(),
            (None, Some(image)) => json!({"spec": {"containers": [self.container(image)]}}),
            _ => return Err("expected either template or image".into()),
        };
        let metadata = object(&mut pods, "metadata")?;
        for (place, all) in [("annotations", &marks.annotations), ("labels", &marks.labels)] {
            let found = object_in(metadata, place)?;
            for (name, value) in all {
                if let Some(value) = value {
                    found.insert((*name).into(), json!(value));
                }
            }
        }
        let spec = object(&mut pods, "spec")?;
        match spec.get("schedulerName").and_then(Value::as_str) {
            Some(other) if other != scheduler => {
                return Err(format!(
                    "template.spec.schedulerName: expected {scheduler}, found {other}"
                ));
            }
            _ => drop(spec.insert("schedulerName".into(), json!(scheduler))),
        }
        let containers = spec.get_mut("containers").and_then(Value::as_array_mut);
        let Some(containers) = containers.filter(|all| !all.is_empty()) else {
            return Err("template.spec.containers: expected a container".into());
        };
        let limit = format!("/resources/limits/{}", names::RESOURCE.replace('/', "~1"));
        let asks = containers.iter().position(|c| c.pointer(&limit).is_some());
        let container = &mut containers[asks.unwrap_or(0)];
        let resources = object(container, "resources")?;
        object_in(resources, "limits")?
            .insert(names::RESOURCE.into(), json!(marks.gpus.to_string()));
        if let Some(port) = marks.port {
            add_port(container, port)?;
        }
        add_variables(container, &marks.env)?;
        Ok(pods)
    }

    fn container(&self, image: &str) -> Value {
        let mut container = json!({"name": "main", "image": image});
        for (name, words) in [("command", self.command), ("args", self.args)] {
            if !words.is_empty() {
                container[name] = json!(words);
            }
        }
        if !self.env.is_empty() {
            container["env"] = json!(self.env);
        }
        container
    }
}

/// The port, and a probe of it: a service counts as started once it answers.
fn add_port(container: &mut Value, port: u16) -> Result<(), String> {
    let ports = list(container, "ports")?;
    if !ports.iter().any(|p| p["containerPort"] == json!(port)) {
        ports.push(json!({"name": "http", "containerPort": port}));
    }
    let probed = container.get("readinessProbe").is_some();
    if !probed {
        container["readinessProbe"] = json!({"tcpSocket": {"port": port}, "periodSeconds": 5});
    }
    Ok(())
}

fn add_variables(container: &mut Value, env: &[(&'static str, String)]) -> Result<(), String> {
    if env.is_empty() {
        return Ok(());
    }
    let found = list(container, "env")?;
    for (name, value) in env {
        if !found.iter().any(|e| e["name"] == json!(name)) {
            found.push(json!({"name": name, "value": value}));
        }
    }
    Ok(())
}

fn list<'a>(of: &'a mut Value, name: &str) -> Result<&'a mut Vec<Value>, String> {
    let wrong = || format!("template: expected {name} to be a list");
    let map = of.as_object_mut().ok_or_else(wrong)?;
    map.entry(name).or_insert_with(|| json!([])).as_array_mut().ok_or_else(wrong)
}

fn object<'a>(of: &'a mut Value, name: &str) -> Result<&'a mut Map<String, Value>, String> {
    let wrong = || format!("template: expected {name} within an object");
    object_in(of.as_object_mut().ok_or_else(wrong)?, name)
}

fn object_in<'a>(
    of: &'a mut Map<String, Value>,
    name: &str,
) -> Result<&'a mut Map<String, Value>, String> {
    let found = of.entry(name).or_insert_with(|| json!({}));
    found.as_object_mut().ok_or_else(|| format!("template: expected {name} to be an object"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(template: &Value) -> Result<Value, String> {
        let source =
            Source { template: Some(template), image: None, command: &[], args: &[], env: &[] };
        let marks = Marks {
            gpus: 2,
            annotations: vec![(names::SHARE, Some("50".into())), (names::MEMORY, None)],
            env: vec![("A", "ours".into()), ("B", "ours".into())],
            ..Marks::default()
        };
        source.pods(&marks, "roommate")
    }

    #[test]
    fn a_template_keeps_what_its_user_wrote() {
        let pods = from(&json!({
            "metadata": {"annotations": {"mine": "kept"}},
            "spec": {"containers": [
                {"name": "side", "image": "s"},
                {"name": "main", "image": "m", "env": [{"name": "A", "value": "mine"}],
                 "resources": {"limits": {"roommate.dev/gpu": "1", "cpu": "3"}}},
            ]},
        }))
        .unwrap();
        let annotations = json!({"mine": "kept", "roommate.dev/gpu-share": "50"});
        assert_eq!(pods["metadata"]["annotations"], annotations);
        assert_eq!(pods["spec"]["schedulerName"], "roommate");
        let [side, main] = &pods["spec"]["containers"].as_array().unwrap()[..] else { panic!() };
        assert_eq!(side.get("resources"), None);
        assert_eq!(main["resources"]["limits"], json!({"roommate.dev/gpu": "2", "cpu": "3"}));
        let env = json!([{"name": "A", "value": "mine"}, {"name": "B", "value": "ours"}]);
        assert_eq!(main["env"], env);
    }

    #[test]
    fn a_template_that_is_none_is_named() {
        for (template, why) in [
            (json!({}), "template.spec.containers: expected a container"),
            (json!({"spec": []}), "template: expected spec to be an object"),
            (
                json!({"spec": {"containers": [{"resources": 1}]}}),
                "template: expected resources to be an object",
            ),
            (
                json!({"spec": {"schedulerName": "other", "containers": [{}]}}),
                "template.spec.schedulerName: expected roommate, found other",
            ),
        ] {
            assert_eq!(from(&template).unwrap_err(), why);
        }
    }
}
