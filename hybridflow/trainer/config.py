"""Configuration, in one import: the typed tree, composing it from overrides, and the checks on it."""

from .checks import check as check
from .compose import compose as compose
from .compose import printable as printable
from .data_config import DataConfig as DataConfig
from .placement import PlacementConfig as PlacementConfig
from .tree import Config as Config
from .tree import CriticConfig as CriticConfig
from .tree import Plugin as Plugin
from .tree import ReferenceConfig as ReferenceConfig
from .tree import RunConfig as RunConfig
from .tree import SamplingConfig as SamplingConfig
from .tree import ValidationConfig as ValidationConfig
from .tree import resolved as resolved
from .tree import to_yaml as to_yaml
from .unread import unread as unread
from .unread import unread_by_roles as unread_by_roles
