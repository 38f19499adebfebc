//! Stands for `etcd` in a build without it: its types have no values.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use super::exporter::Exporter;
use super::registration::{Registration, RegistrationState};
use super::watch::DirectoryWatch;
use crate::Result;

pub(super) enum Etcd {}

impl Etcd {
    pub async fn resolve(&self, _: &str) -> Result<Vec<Exporter>> {
        match *self {}
    }

    pub fn watch(self: &Arc<Self>, _: &str) -> Result<DirectoryWatch> {
        match **self {}
    }

    pub fn register(self: &Arc<Self>, _: Exporter) -> Result<Registration> {
        match **self {}
    }
}

impl fmt::Display for Etcd {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}

pub(super) enum Active {}

impl Active {
    pub fn change(&self, _: impl FnOnce(&mut BTreeSet<String>) -> bool) {
        match *self {}
    }

    pub fn state(&self) -> RegistrationState {
        match *self {}
    }

    pub async fn changed(&self, _: &RegistrationState) -> RegistrationState {
        match *self {}
    }

    pub async fn close(self) -> Result<()> {
        match self {}
    }
}
